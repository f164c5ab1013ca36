"""Sources of text: each turns files into documents, in three splits."""

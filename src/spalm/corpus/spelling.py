"""Tokens that are bytes, spelled: as text where they are text, in hexadecimal where they are not."""


def spelled(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"⟨{content.hex().upper()}⟩"


def _letters_to_bytes() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: printable ones as themselves, the others from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


LETTERS_TO_BYTES = _letters_to_bytes()


def spelled_letters(token: str) -> str:
    """A token of byte-level BPE."""
    return spelled(bytes(LETTERS_TO_BYTES[letter] for letter in token))

// Elements of the page. Text from a corpus always becomes a text node, so that markup in it is never interpreted.

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const word = (shown, came = false) => make("span", { class: came ? "word came" : "word" }, shown);
export const shortly = (value) => (value >= 0.0995 ? value.toFixed(2) : value.toPrecision(2));
export const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
export const grouped = (count) => count.toLocaleString("en");
export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Returns a line for each place where a span stands word for word in the memory.
export function verbatim(span) {
  const more = span.count - span.sources.length;
  return make("div", { class: "verbatim-span" },
    make("div", {}, `${grouped(span.end - span.start)} tokens, from ${span.start} to ${span.end - 1}, word for word in`),
    ...span.sources.map((each) => make("div", { class: "source" }, `${each.document}, token ${grouped(each.offset)}`)),
    more > 0 ? make("div", { class: "source" }, `and ${grouped(more)} more`) : "");
}

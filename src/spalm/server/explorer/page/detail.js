// The details of one token: what the models predicted there, and where its neighbours and exact matches come from.

import { grouped, make, shortly, verbatim, word } from "./elements.js";

const $ = (id) => document.getElementById(id);

const MOST_SPANS = 5;

// `spans` are those at the token that stand word for word in the memory. `switches` holds the documents that are off, and
// the functions that switch an entry or a document.
export function showDetail(found, spans, between, switches) {
  const focused = document.activeElement?.dataset?.keep;
  const rows = Object.entries(found.probability).map(([name, probability]) =>
    make("tr", { "data-model": name },
      make("td", {}, name),
      make("td", { class: "probability" }, shortly(probability)),
      make("td", {}, found.network[name] < 1 ? `memory ${shortly(1 - found.network[name])}` : ""),
      make("td", { class: "wrapped" }, ...found.likely[name].slice(0, 3).map((each) =>
        make("span", { class: "pair" }, word(each.shown, each.came), ` ${shortly(each.probability)}`)))));
  const head = ["model", "probability", "", "likeliest"].map((name) => make("th", { scope: "col" }, name));
  $("chosen").replaceChildren(
    make("h2", {}, "Token ", word(found.shown), ` at ${found.position}`),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))),
    ...(spans.length ? [make("h3", {}, "Word for word in the memory"), ...spans.slice(0, MOST_SPANS).map(verbatim)] : []),
    ...found.matches.flatMap((each) => match(each, between, switches)),
    ...(found.neighbours.length ? [make("h3", {}, "Neighbours, nearest first")] : []),
    ...found.neighbours.map((each) => entry(each, between, switches, "neighbour")),
    ...(found.neighbours.length || found.matches.length ? [] : [make("h3", {}, "The memory found nothing here")]));
  $("hint").hidden = true;
  $("chosen").hidden = false;
  for (const text of document.querySelectorAll("#chosen .text")) {
    text.scrollTop = text.querySelector("mark").offsetTop - text.clientHeight / 2;
  }
  if (focused) document.querySelector(`[data-keep="${focused}"]`)?.focus();
  const on = found.neighbours.filter((each) => each.on).length;
  $("status").textContent = `${found.shown} at ${found.position}: ${on} neighbours on, ${found.neighbours.length - on} off`;
}

// An exact match: the text before the token that stands in the memory too, and some of the places where it stands.
function match(found, between, switches) {
  const places = found.count === 1 ? "one place" : `${grouped(found.count)} places`;
  return [
    make("h3", {}, `The last ${found.length} token${found.length === 1 ? "" : "s"} stand at ${places}`),
    ...found.places.map((each) => entry(each, between, switches, "place")),
  ];
}

// An entry of the memory: a neighbour, or a place of an exact match.
function entry(each, between, switches, kind) {
  const model = $("model").value;
  const weighted = model in each.weights ? model : Object.keys(each.weights)[0];
  const documentOff = switches.documents.has(each.document_number);
  return make("div", { class: `entry ${kind}${each.on ? "" : " is-off"}`, "data-id": each.id },
    make("div", { class: "row" },
      make("label", {},
        make("input", {
          type: "checkbox",
          checked: each.on && "",
          "data-keep": `${kind}-${each.id}`,
          "aria-label": `use the ${kind} ${each.shown} from ${each.document}`,
          onchange: (event) => switches.entry(each, event.target.checked),
        }),
        word(each.shown, each.came)),
      make("span", {}, `weight ${shortly(each.weights[weighted] || 0)} in ${weighted}`),
      ...("distance" in each ? [make("span", {}, `distance ${each.distance.toPrecision(4)}`)] : [])),
    make("div", { class: "text" }, each.before + between, make("mark", { class: each.came ? "" : "other" }, each.token), between + each.after),
    make("div", { class: "row" },
      make("span", { class: "source" }, `${each.document}, token ${grouped(each.offset)}`),
      make("button", {
        type: "button",
        class: "small",
        "data-keep": `document-of-${kind}-${each.id}`,
        "aria-pressed": String(documentOff),
        onclick: () => switches.document(each),
      }, documentOff ? "switch document on" : "switch document off")));
}

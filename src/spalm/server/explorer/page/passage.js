// The passage: its tokens, their colours, and the tip beside the token under the pointer.

import { grouped, make, mean, shortly, signed, verbatim, word } from "./elements.js";

const $ = (id) => document.getElementById(id);
const LEGENDS = {
  gain: "Green: the model gives the token more than what it is compared with; orange and dotted: less. Full at 3 nats.",
  network: "The darker, the larger the memory's share: one minus the gate, or the weight of the neighbours.",
  surprise: "The darker, the less the model expected the token. Full at 10 nats.",
};

let found = null; // the server's answer
let between = "";
let traced = { least: 0, spans: [] }; // what of the passage stands word for word in the memory
let covered = new Set(); // the positions of these spans

const colouring = () => document.querySelector("input[name=colour]:checked").value;

function gain(model, position) {
  const scores = found.models[model];
  const against = $("against").value;
  const other = against ? found.models[against].log_probabilities : scores.without_memory || scores.log_probabilities;
  return scores.log_probabilities[position] - other[position];
}

const memoryShare = (scores, position) => (scores.network ? 1 - scores.network[position] : 0);

// Returns [colour, strength from 0 to 1, whether the token is underlined].
function tint(model, position) {
  const scores = found.models[model];
  switch (colouring()) {
    case "gain": {
      const value = gain(model, position);
      return [value < 0 ? "--loss" : "--gain", Math.min(1, Math.abs(value) / 3), value <= -0.5];
    }
    case "network":
      return ["--memory", memoryShare(scores, position), false];
    default:
      return ["--surprise", Math.min(1, -scores.log_probabilities[position] / 10), false];
  }
}

function describe(model, position) {
  const scores = found.models[model];
  const own = scores.log_probabilities[position];
  const colour = {
    gain: `gain ${signed(gain(model, position))}`,
    network: `memory ${shortly(memoryShare(scores, position))}`,
    surprise: `surprise ${(-own).toFixed(1)}`,
  }[colouring()];
  const stands = covered.has(position) ? ", word for word in the memory" : "";
  return `${found.shown[position]}, probability ${shortly(Math.exp(own))}, ${colour}${stands}`;
}

// Returns the spans that hold a position and stand word for word in the memory, longest first.
export const spansAt = (position) => traced.spans.filter((span) => span.start <= position && position < span.end);

// Takes the spans of the passage that stand word for word in the memory; null while they are not known.
export function setSpans(answer) {
  traced = answer || { least: 0, spans: [] };
  covered = new Set();
  for (const { start, end } of traced.spans) for (let position = start; position < end; position++) covered.add(position);
  const count = `${grouped(covered.size)} of ${grouped(found?.tokens.length || 0)} tokens`;
  $("verbatim").textContent = !answer ? "" : covered.size
    ? `Underlined: ${count} stand word for word in the memory, in spans of ${traced.least} or more.`
    : `No span of ${traced.least} or more tokens stands word for word in the memory.`;
}

export function showPassage(answer, betweenTokens) {
  found = answer;
  between = betweenTokens;
  const beside = $("beside").value;
  const models = beside ? [$("model").value, beside] : [$("model").value];
  $("panes").replaceChildren(
    ...models.map((model) =>
      make("div", { class: "pane" }, models.length > 1 ? make("h3", {}, model) : "", pane(model))),
  );
  paint();
}

function pane(model) {
  const pieces = document.createDocumentFragment();
  found.tokens.forEach((token, position) => {
    pieces.append(make("span", {
      class: /[^\s↵·]/.test(token) ? "token" : "token blank",
      role: "option",
      "data-position": position,
      "aria-selected": "false",
      "aria-describedby": "tip",
      tabindex: "-1",
    }, token), between);
  });
  return make("div", { class: "passage", role: "listbox", "aria-label": `Passage under ${model}`, "data-model": model }, pieces);
}

// Updates the colours and labels of the tokens that are shown, with new numbers if there are any.
export function paint(answer = found) {
  found = answer;
  for (const passage of document.querySelectorAll(".passage")) {
    const model = passage.dataset.model;
    for (const piece of passage.querySelectorAll(".token")) {
      const position = Number(piece.dataset.position);
      const [hue, strength, under] = tint(model, position);
      piece.style.setProperty("--tint", `var(${hue})`);
      piece.style.setProperty("--strength", strength.toFixed(3));
      piece.classList.toggle("under", under);
      piece.classList.toggle("verbatim", covered.has(position));
      piece.setAttribute("aria-label", describe(model, position));
    }
  }
  $("legend").textContent = LEGENDS[colouring()];
  $("against-label").hidden = colouring() !== "gain";
  showSummary();
}

function showSummary() {
  $("summary").tBodies[0].replaceChildren(
    ...Object.entries(found.models).map(([name, scores]) => {
      const own = mean(scores.log_probabilities);
      const alone = scores.without_memory && mean(scores.without_memory);
      return make("tr", { "data-model": name },
        make("td", {}, name),
        make("td", { class: "perplexity" }, Math.exp(-own).toFixed(2)),
        make("td", {}, alone === undefined ? "" : Math.exp(-alone).toFixed(2)),
        make("td", {}, (-own).toFixed(3)));
    }),
  );
}

// Marks the token at `position` as the keyboard's, and the one at `selected` as the one whose neighbours are shown.
export function choose(position, selected) {
  for (const piece of document.querySelectorAll('.token[tabindex="0"], .token[aria-selected=true]')) {
    piece.tabIndex = -1;
    piece.setAttribute("aria-selected", "false");
  }
  for (const piece of tokensAt(position)) piece.tabIndex = 0;
  if (selected !== null) for (const piece of tokensAt(selected)) piece.setAttribute("aria-selected", "true");
}

const tokensAt = (position) => document.querySelectorAll(`.token[data-position="${position}"]`);

export function focusToken(position, within = document) {
  within.querySelector(`.token[data-position="${position}"]`)?.focus();
}

export function whereTo(key, position) {
  const last = found.tokens.length - 1;
  const to = { ArrowRight: position + 1, ArrowDown: position + 10, ArrowLeft: position - 1, ArrowUp: position - 10, Home: 0, End: last }[key];
  return to === undefined ? null : Math.max(0, Math.min(last, to));
}

export function showTip(piece) {
  const position = Number(piece.dataset.position);
  const rows = Object.entries(found.models).map(([name, scores]) =>
    make("tr", { "data-model": name },
      make("td", {}, name),
      make("td", { class: "probability" }, shortly(Math.exp(scores.log_probabilities[position]))),
      make("td", {}, scores.network ? `memory ${shortly(memoryShare(scores, position))}` : "")));
  $("tip").replaceChildren(
    make("div", {}, word(found.shown[position])),
    make("table", {}, make("tbody", {}, ...rows)),
    ...spansAt(position).slice(0, 1).map(verbatim));
  $("tip").hidden = false;
  const box = piece.getBoundingClientRect();
  const own = $("tip").getBoundingClientRect();
  const below = box.bottom + 6 + own.height < window.innerHeight;
  $("tip").style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8))}px`;
  $("tip").style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
}

export const hideTip = () => ($("tip").hidden = true);

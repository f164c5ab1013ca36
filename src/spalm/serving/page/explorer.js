// The explorer's page. Text from a corpus only ever becomes a text node: markup in it is never markup here.

const $ = (id) => document.getElementById(id);

const state = {
  about: null,
  question: null, // { text } or { place }: what is being read
  found: null, // the answer to it
  chosen: null, // position of the token whose neighbours are shown
  entriesOff: new Map(), // id -> what to call it
  documentsOff: new Set(),
};

// ---- asking

async function ask(path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  const answer = await fetch(path, options || {});
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || problemOf(content) || `the server answered ${answer.status}`);
  return content;
}

function problemOf(content) {
  const first = Array.isArray(content.detail) && content.detail[0];
  return first && `${first.loc.at(-1)}: ${first.msg}`;
}

function switches() {
  return { entries_off: [...state.entriesOff.keys()], documents_off: [...state.documentsOff] };
}

function complain(error) {
  $("problem").textContent = error ? error.message : "";
  $("problem").hidden = !error;
}

async function busy(work) {
  const buttons = document.querySelectorAll("form > button");
  buttons.forEach((each) => (each.disabled = true));
  document.body.setAttribute("aria-busy", "true");
  try {
    await work();
    complain(null);
  } catch (error) {
    complain(error);
  } finally {
    buttons.forEach((each) => (each.disabled = false));
    document.body.removeAttribute("aria-busy");
  }
}

// ---- building

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const percent = (probability) => (probability >= 0.0995 ? probability.toFixed(2) : probability.toPrecision(2));
const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

function visible(token) {
  return [...token].map((letter) => ({ "\n": "↵", "\t": "→", " ": "·" })[letter] || letter).join("") || "∅";
}

function word(token, also = "") {
  return make("span", { class: `word ${also}` }, visible(token));
}

// ---- what a token is coloured by

function colouring() {
  return document.querySelector("input[name=colour]:checked").value;
}

function reference(model) {
  const against = $("against").value;
  if (against === "") return state.found.models[model].without_memory || state.found.models[model].log_probabilities;
  return state.found.models[against].log_probabilities;
}

function tint(model, position) {
  const scores = state.found.models[model];
  const own = scores.log_probabilities[position];
  if (colouring() === "gain") {
    const gain = own - reference(model)[position];
    return [gain < 0 ? "--loss" : "--gain", Math.min(1, Math.abs(gain) / 3) * 0.6, gain <= -0.5];
  }
  if (colouring() === "network") return ["--memory", scores.network ? (1 - scores.network[position]) * 0.6 : 0, false];
  return ["--surprise", Math.min(1, -own / 10) * 0.6, false];
}

const LEGENDS = {
  gain: "Green: the model gives the token more than what it is compared with; orange and dotted: less. Full at 3 nats.",
  network: "The darker, the more the memory's word counts: one minus the gate, or the weight of the neighbours.",
  surprise: "The darker, the less the model expected the token. Full at 10 nats.",
};

function describe(model, position) {
  const scores = state.found.models[model];
  const own = scores.log_probabilities[position];
  const gain = own - reference(model)[position];
  return `${visible(state.found.tokens[position])}, probability ${percent(Math.exp(own))}, gain ${signed(gain)}`;
}

// ---- the passage

function panesWanted() {
  const beside = $("beside").value;
  return beside ? [$("model").value, beside] : [$("model").value];
}

function showPassage() {
  const panes = panesWanted();
  $("panes").replaceChildren(
    ...panes.map((model) => {
      const passage = make("div", {
        class: "passage",
        role: "listbox",
        "aria-label": `Passage under ${model}`,
        "data-model": model,
      });
      const pieces = document.createDocumentFragment();
      state.found.tokens.forEach((token, position) => {
        const blank = token.trim() === "";
        const piece = make("span", {
          class: blank ? "token blank" : "token",
          role: "option",
          "data-position": position,
          tabindex: "-1",
        }, blank ? visible(token) : token);
        pieces.append(piece);
        if (state.about.between) pieces.append(state.about.between);
        if (token.includes("\n")) pieces.append(make("br"));
      });
      passage.append(pieces);
      return make("div", { class: "pane" }, panes.length > 1 ? make("h3", {}, model) : "", passage);
    }),
  );
  colour();
  choose(Math.min(state.chosen ?? 0, state.found.tokens.length - 1), false);
}

function colour() {
  for (const passage of document.querySelectorAll(".passage")) {
    const model = passage.dataset.model;
    for (const piece of passage.querySelectorAll(".token")) {
      const position = Number(piece.dataset.position);
      const [hue, strength, under] = tint(model, position);
      piece.style.setProperty("--tint", `var(${hue})`);
      piece.style.setProperty("--strength", strength.toFixed(3));
      piece.classList.toggle("under", under);
      piece.setAttribute("aria-label", describe(model, position));
    }
  }
  $("legend").textContent = LEGENDS[colouring()];
  $("against-label").hidden = colouring() !== "gain";
  showSummary();
}

function showSummary() {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  $("summary").tBodies[0].replaceChildren(
    ...Object.entries(state.found.models).map(([name, scores]) => {
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

function tokensAt(position) {
  return document.querySelectorAll(`.token[data-position="${position}"]`);
}

function choose(position, focus, pane = document.querySelector(".passage")) {
  for (const piece of document.querySelectorAll('.token[tabindex="0"], .token[aria-selected=true]')) {
    piece.tabIndex = -1;
    piece.removeAttribute("aria-selected");
  }
  for (const piece of tokensAt(position)) {
    piece.tabIndex = 0;
    if (position === state.chosen) piece.setAttribute("aria-selected", "true");
  }
  if (focus) pane.querySelector(`[data-position="${position}"]`).focus();
}

async function open(position) {
  state.chosen = position;
  choose(position, false);
  await busy(async () => showDetail(await ask("api/token", { ...state.question, ...switches(), position })));
  if (matchMedia("(max-width: 60rem)").matches) {
    hideTip();
    $("detail").scrollIntoView({ block: "start" });
  }
}

// ---- one token

function showDetail(found) {
  $("hint").hidden = true;
  const probabilities = Object.entries(found.probability).map(([name, probability]) =>
    make("tr", { "data-model": name },
      make("td", {}, name),
      make("td", { class: "probability" }, percent(probability)),
      make("td", {}, found.network[name] < 1 ? `memory ${percent(1 - found.network[name])}` : ""),
      make("td", { class: "wrapped" }, ...found.likely[name].slice(0, 3).flatMap((each) => [word(each.token, each.came ? "came" : ""), ` ${percent(each.probability)}  `]))));
  const chosen = make("div", {},
    make("h2", {}, "Token ", word(found.token), ` at ${found.position}`),
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...["model", "probability", "", "likeliest"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...probabilities))),
    make("h3", {}, found.neighbours.length ? "Neighbours, nearest first" : "The memory found nothing here"),
    ...found.neighbours.map(showNeighbour));
  $("chosen").replaceChildren(chosen);
  $("chosen").hidden = false;
  for (const text of chosen.querySelectorAll(".text")) {
    text.scrollTop = text.querySelector("mark").offsetTop - text.clientHeight / 2;
  }
}

function showNeighbour(each) {
  const model = $("model").value;
  const shown = model in each.weights ? model : Object.keys(each.weights)[0];
  const name = `neighbour ${visible(each.token)} from ${each.document}`;
  return make("div", { class: each.on ? "neighbour" : "neighbour is-off", "data-id": each.id },
    make("div", { class: "row" },
      make("label", {},
        make("input", {
          type: "checkbox",
          checked: each.on && "",
          "aria-label": `use ${name}`,
          onchange: (event) => switchEntry(each, event.target.checked),
        }),
        word(each.token, each.came ? "came" : "")),
      make("span", {}, `weight ${percent(each.weights[shown] || 0)} in ${shown}`),
      make("span", {}, `distance ${each.distance.toPrecision(4)}`)),
    make("div", { class: "text" }, each.before + state.about.between, make("mark", { class: each.came ? "" : "other" }, each.token), state.about.between + each.after),
    make("div", { class: "row" },
      make("span", { class: "source" }, `${each.document}, token ${each.offset.toLocaleString("en")}`),
      make("button", {
        type: "button",
        class: "small",
        "aria-pressed": String(state.documentsOff.has(each.document)),
        onclick: () => switchDocument(each.document),
      }, state.documentsOff.has(each.document) ? "switch document on" : "switch document off")));
}

// ---- switching parts of the memory off

function switchEntry(each, on) {
  if (on) state.entriesOff.delete(each.id);
  else state.entriesOff.set(each.id, `${visible(each.token)} from ${each.document}`);
  return again();
}

function switchDocument(name) {
  if (!state.documentsOff.delete(name)) state.documentsOff.add(name);
  return again();
}

function again() {
  return busy(async () => {
    showOff();
    state.found = await ask("api/passage", { ...state.question, ...switches() });
    colour();
    if (state.chosen !== null) showDetail(await ask("api/token", { ...state.question, ...switches(), position: state.chosen }));
  });
}

function showOff() {
  const count = state.entriesOff.size + state.documentsOff.size;
  $("off").hidden = count === 0;
  if (!count) return;
  $("off").replaceChildren(
    make("span", {}, `Off: ${[...state.documentsOff, ...state.entriesOff.values()].slice(0, 4).join("; ")}${count > 4 ? ` and ${count - 4} more` : ""}`),
    make("button", { type: "button", class: "small", onclick: () => { state.entriesOff.clear(); state.documentsOff.clear(); return again(); } }, "switch everything on"));
}

// ---- the tip beside the pointer

function showTip(piece) {
  const position = Number(piece.dataset.position);
  const rows = Object.entries(state.found.models).map(([name, scores]) =>
    make("tr", { "data-model": name },
      make("td", {}, name),
      make("td", { class: "probability" }, percent(Math.exp(scores.log_probabilities[position]))),
      make("td", {}, scores.network ? `memory ${percent(1 - scores.network[position])}` : "")));
  $("tip").replaceChildren(make("div", {}, word(state.found.tokens[position])), make("table", {}, make("tbody", {}, ...rows)));
  $("tip").hidden = false;
  const box = piece.getBoundingClientRect();
  const own = $("tip").getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8));
  const below = box.bottom + 6 + own.height < window.innerHeight;
  $("tip").style.left = `${left}px`;
  $("tip").style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
}

const hideTip = () => ($("tip").hidden = true);
const tokenOf = (event) => event.target.closest?.(".token");

$("panes").addEventListener("mouseover", (event) => tokenOf(event) && showTip(tokenOf(event)));
$("panes").addEventListener("mouseout", hideTip);
$("panes").addEventListener("focusin", (event) => tokenOf(event)?.matches(":focus-visible") && showTip(tokenOf(event)));
$("panes").addEventListener("focusout", hideTip);
$("panes").addEventListener("scroll", hideTip, true);
$("panes").addEventListener("click", (event) => tokenOf(event) && open(Number(tokenOf(event).dataset.position)));
$("panes").addEventListener("keydown", (event) => {
  const piece = tokenOf(event);
  if (!piece) return;
  const position = Number(piece.dataset.position);
  const last = state.found.tokens.length - 1;
  const to = { ArrowRight: position + 1, ArrowDown: position + 10, ArrowLeft: position - 1, ArrowUp: position - 10, Home: 0, End: last }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    choose(Math.max(0, Math.min(last, to)), true, piece.closest(".passage"));
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(position);
  } else if (event.key === "Escape") hideTip();
});

// ---- choosing

async function read(question) {
  await busy(async () => {
    state.found = await ask("api/passage", { ...question, ...switches() });
    state.question = question;
    state.chosen = null;
    $("title").textContent = state.found.title;
    $("result").hidden = false;
    $("hint").hidden = false;
    $("chosen").hidden = true;
    showPassage();
  });
}

$("own").addEventListener("submit", (event) => {
  event.preventDefault();
  read({ text: $("text").value });
});

$("place").addEventListener("submit", (event) => {
  event.preventDefault();
  read({ place: { split: $("split").value, document: $("document").value, offset: Number($("offset").value), length: Number($("length").value) } });
});

async function listDocuments() {
  const query = new URLSearchParams({ split: $("split").value, containing: $("containing").value });
  const found = await ask(`api/documents?${query}`);
  $("document").replaceChildren(...found.map((each) => make("option", { value: each.name }, `${each.name} (${each.tokens.toLocaleString("en")} tokens)`)));
}

$("split").addEventListener("change", () => busy(listDocuments));
$("containing").addEventListener("input", () => busy(listDocuments));
$("against").addEventListener("change", colour);
for (const id of ["model", "beside"]) $(id).addEventListener("change", showPassage);
document.querySelectorAll("input[name=colour]").forEach((each) => each.addEventListener("change", colour));

await busy(async () => {
  state.about = await ask("api/about");
  const { title, memory, models } = state.about;
  $("about").textContent = `${title}: ${memory.entries.toLocaleString("en")} entries of ${memory.documents.toLocaleString("en")} documents in memory`;
  document.title = `${title} · spalm explorer`;
  const options = (names) => names.map((name) => make("option", { value: name }, name));
  const names = models.map((each) => each.name);
  const withMemory = models.filter((each) => each.memory).map((each) => each.name);
  $("model").replaceChildren(...options(names));
  $("model").value = withMemory.includes("spalm") ? "spalm" : withMemory.at(-1) || names[0];
  $("against").replaceChildren(make("option", { value: "" }, "itself without memory"), ...options(names));
  if (names.includes("transformer-xl")) $("against").value = "transformer-xl";
  $("beside").replaceChildren(make("option", { value: "" }, "nothing"), ...options(names));
  await listDocuments();
  if ($("document").options.length) $("place").requestSubmit();
});

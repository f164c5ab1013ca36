// The explorer's page: its state (the passage, what is switched off) and its event handlers.

import { ask, busy } from "./requests.js";
import { showDetail } from "./detail.js";
import { grouped, make } from "./elements.js";
import { choose, focusToken, hideTip, paint, setSpans, showPassage, showTip, spansAt, whereTo } from "./passage.js";

const $ = (id) => document.getElementById(id);
const MOST_LISTED = 200;

const state = {
  about: null,
  question: null, // the passage that is shown: { text } or { place }
  found: null, // the server's answer for that passage
  chosen: null, // position of the token whose neighbours are shown
  entriesOff: new Map(), // id -> name to show
  documentsOff: new Map(), // number -> name
};

const off = () => ({ entries_off: [...state.entriesOff.keys()], documents_off: [...state.documentsOff.keys()] });

// ---- reading

const readPassage = (question) =>
  busy(async () => {
    const found = await ask("passage", "api/passage", { ...question, ...off() });
    Object.assign(state, { question, found, chosen: null });
    $("title").textContent = found.title;
    $("result").hidden = false;
    $("hint").hidden = false;
    $("chosen").hidden = true;
    $("status").textContent = `${found.title}: ${grouped(found.tokens.length)} tokens`;
    setSpans(null);
    rebuild();
    await trace();
    await detail(); // of a token that was chosen meanwhile
  });

// Marks what stands word for word in the memory, which the server may need a moment to find.
async function trace() {
  const found = await ask("trace", "api/trace", { ...state.question, ...off() });
  setSpans(found);
  paint();
}

function rebuild() {
  showPassage(state.found, state.about.between);
  choose(Math.min(state.chosen ?? 0, state.found.tokens.length - 1), state.chosen);
}

async function detail() {
  if (state.chosen === null) return;
  const found = await ask("token", "api/token", { ...state.question, ...off(), position: state.chosen });
  showDetail(found, spansAt(state.chosen), state.about.between, { documents: state.documentsOff, entry: switchEntry, document: switchDocument });
}

async function open(position) {
  state.chosen = position;
  choose(position, position);
  await busy(detail);
  if (matchMedia("(max-width: 68rem)").matches) {
    hideTip();
    $("detail").scrollIntoView({ block: "start" });
  }
}

// ---- switching parts of the memory off

function switchEntry(each, on) {
  if (on) state.entriesOff.delete(each.id);
  else state.entriesOff.set(each.id, `${each.shown} from ${each.document}`);
  return readAgain();
}

function switchDocument(each) {
  if (!state.documentsOff.delete(each.document_number)) state.documentsOff.set(each.document_number, each.document);
  return readAgain();
}

const readAgain = () =>
  busy(async () => {
    showOff();
    state.found = await ask("passage", "api/passage", { ...state.question, ...off() });
    paint(state.found);
    await trace();
    await detail();
  });

function showOff() {
  const names = [...state.documentsOff.values(), ...state.entriesOff.values()];
  $("off").hidden = !names.length;
  const more = names.length > 4 ? ` and ${names.length - 4} more` : "";
  $("off").replaceChildren(
    make("span", {}, `Off: ${names.slice(0, 4).join("; ")}${more}`),
    make("button", { type: "button", class: "small", onclick: everythingOn }, "switch everything on"));
}

function everythingOn() {
  state.entriesOff.clear();
  state.documentsOff.clear();
  focusToken(state.chosen ?? 0);
  return readAgain();
}

// ---- the passage: mouse and keyboard

const tokenOf = (event) => event.target.closest?.(".token");
const focusedToken = () => document.activeElement?.closest?.(".token:focus-visible");

$("panes").addEventListener("mouseover", (event) => tokenOf(event) && showTip(tokenOf(event)));
$("panes").addEventListener("mouseout", hideTip);
$("panes").addEventListener("focusin", () => focusedToken() && showTip(focusedToken()));
$("panes").addEventListener("focusout", hideTip);
$("panes").addEventListener("scroll", () => (focusedToken() ? showTip(focusedToken()) : hideTip()), true);
$("panes").addEventListener("click", (event) => tokenOf(event) && open(Number(tokenOf(event).dataset.position)));
$("panes").addEventListener("keydown", (event) => {
  const piece = tokenOf(event);
  if (!piece) return;
  const to = whereTo(event.key, Number(piece.dataset.position));
  if (to !== null) {
    event.preventDefault();
    choose(to, state.chosen);
    focusToken(to, piece.closest(".passage"));
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(Number(piece.dataset.position));
  } else if (event.key === "Escape") hideTip();
});

// ---- choosing what to read

$("own").addEventListener("submit", (event) => {
  event.preventDefault();
  readPassage({ text: $("text").value });
});

$("place").addEventListener("submit", (event) => {
  event.preventDefault();
  const [document, offset, length] = ["document", "offset", "length"].map((id) => Number($(id).value));
  readPassage({ place: { split: $("split").value, document, offset, length } });
});

async function listDocuments() {
  const query = new URLSearchParams({ split: $("split").value, containing: $("containing").value });
  const found = await ask("documents", `api/documents?${query}`);
  const options = found.map((each) => make("option", { value: each.number }, `${each.name} (${grouped(each.tokens)} tokens)`));
  if (found.length === MOST_LISTED) options.push(make("option", { disabled: "" }, `the first ${MOST_LISTED}; search for others`));
  if (!found.length) options.push(make("option", { disabled: "" }, "no such document"));
  $("document").replaceChildren(...options);
  $("place").querySelector("button").hidden = !found.length;
}

let typing = 0;
$("containing").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => busy(listDocuments), 200);
});
$("split").addEventListener("change", () => busy(listDocuments));
$("against").addEventListener("change", () => paint());
for (const id of ["model", "beside"]) $(id).addEventListener("change", rebuild);
for (const each of document.querySelectorAll("input[name=colour]")) each.addEventListener("change", () => paint());

busy(async () => {
  state.about = await ask("about", "api/about");
  const { title, memory, models, longest } = state.about;
  $("about").textContent = `${title}: ${grouped(memory.entries)} entries of ${grouped(memory.documents)} documents in memory`;
  document.title = `${title} · spalm explorer`;
  $("length").max = longest;
  const options = (names) => names.map((name) => make("option", { value: name }, name));
  const names = models.map((each) => each.name);
  const withMemory = models.filter((each) => each.memory).map((each) => each.name);
  $("model").replaceChildren(...options(names));
  $("model").value = withMemory.includes("spalm") ? "spalm" : withMemory.at(-1) || names[0];
  $("against").replaceChildren(make("option", { value: "" }, "itself without memory"), ...options(names));
  if (names.includes("transformer-xl")) $("against").value = "transformer-xl";
  $("beside").replaceChildren(make("option", { value: "" }, "nothing"), ...options(names));
  await listDocuments();
  if ($("document").value) $("place").requestSubmit();
});

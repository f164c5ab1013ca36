// Requests to the server. Only the answer to the last request of a kind counts: late answers to earlier ones are dropped.

const $ = (id) => document.getElementById(id);
const turns = new Map();
let waiting = 0;

export class Overtaken extends Error {}

export async function ask(kind, path, body) {
  const turn = (turns.get(kind) || 0) + 1;
  turns.set(kind, turn);
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  const answer = await fetch(path, options || {});
  const content = await answer.json().catch(() => ({}));
  if (turns.get(kind) !== turn) throw new Overtaken();
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

// Does some work, marks the page as busy meanwhile, and shows an error if the work fails.
export async function busy(work) {
  mark(++waiting);
  try {
    await work();
    complain("");
  } catch (error) {
    if (!(error instanceof Overtaken)) complain(error.message);
  } finally {
    mark(--waiting);
  }
}

function mark(count) {
  document.body.toggleAttribute("aria-busy", count > 0);
  for (const button of document.querySelectorAll("form > button")) button.setAttribute("aria-disabled", String(count > 0));
}

function complain(message) {
  $("problem").textContent = message;
  $("problem").hidden = !message;
}

// The success classifier on the page of the training: fit it, what it is worth, which labels to look at again.

import { element, onClick, setText, showProblem } from "./dom";
import { choose, recorded } from "./episodes";
import { ask, type Classifier } from "./protocol";

const POLL_MS = 2000;
let listed = ""; // disagreements that are shown

export function startClassifier(): void {
  onClick("c-fit", () => void show(() => ask<Classifier>("/api/classifier/fit", "POST")));
  setInterval(() => void loadClassifier(), POLL_MS);
}

export async function loadClassifier(): Promise<void> {
  if (!element("training").hidden && !document.hidden) await show(() => ask<Classifier>("/api/classifier"));
}

async function show(request: () => Promise<Classifier>): Promise<void> {
  try {
    const newest = await request();
    const text = described(newest);
    setText(element("c-state"), text);
    list(newest.state === "done" ? newest.disagreements : []);
  } catch (error) {
    showProblem(error instanceof Error ? error.message : String(error));
  }
}

function described(newest: Classifier): string {
  if (newest.state === "none") return "No fit yet. It needs successes and failures.";
  if (newest.state === "running") return `${newest.fit}, under way. ${newest.log}`;
  if (newest.state === "failed") return `${newest.fit} ended without a classifier. ${newest.log}`;
  const rate = (one: { value: number | null; interval: [number, number] }) =>
    one.value === null ? "unknown" : `${percent(one.value)} (${percent(one.interval[0])} to ${percent(one.interval[1])})`;
  const labels = newest.disagreements.length === 1 ? "1 label" : `${newest.disagreements.length} labels`;
  return (
    `classifiers/${newest.fit}: on ${newest.episodes} held-out episodes precision ${rate(newest.precision)}, recall ${rate(newest.recall)}; ` +
    `threshold ${newest.threshold.toFixed(2)}. ${labels} to review.`
  );
}

function list(found: Extract<Classifier, { state: "done" }>["disagreements"]): void {
  const now = JSON.stringify(found);
  if (now === listed) return;
  listed = now;
  element("c-review").hidden = found.length === 0;
  const rows = found.map((one) => {
    const open = document.createElement("button");
    open.type = "button";
    open.textContent = recorded(one.episode);
    open.addEventListener("click", () => {
      location.hash = "#episodes";
      choose(one.episode);
    });
    const row = document.createElement("tr");
    const said = one.declared_at === null ? "no success" : `success ${one.labeled ? "already " : ""}at step ${one.declared_at}`;
    for (const content of [open, one.task, one.labeled ? "success" : "failure", `${said} (${one.score.toFixed(2)})`]) {
      const cell = document.createElement("td");
      cell.append(content);
      row.append(cell);
    }
    return row;
  });
  element("c-list").querySelector("tbody")?.replaceChildren(...rows);
}

const percent = (share: number) => `${Math.round(100 * share)} %`;

// The page of the training: how each policy version did at the robot, the loss of the last rounds, roll-back.

import { clearedCanvas, color, element, onClick, setText, showProblem } from "./dom";
import { ask, type Training, type TrainingVersion } from "./protocol";

const POLL_MS = 2000;
let shown: Training | null = null;
let may = false;

export function startTraining(operator: boolean): void {
  may = operator;
  onClick("t-rollback", () => void rollBack());
  addEventListener("resize", draw);
  setInterval(() => void loadTraining(), POLL_MS);
}

export async function loadTraining(): Promise<void> {
  if (element("training").hidden || document.hidden) return;
  try {
    shown = await ask<Training>("/api/training");
    showVersions(shown.versions);
    const last = shown.rounds.at(-1);
    const loss = last?.loss.at(-1);
    const rounds = last === undefined ? "No round yet. Start one with: vla-rl learn FOLDER --watch" :
      `Round ${last.round}${last.version === null ? ", under way" : `: version ${last.version.slice(0, 8)}`}` +
      (loss === undefined ? "" : `; step ${last.steps.at(-1)}, loss ${loss.toFixed(4)}`);
    setText(element("t-rounds"), rounds);
    draw();
  } catch (error) {
    showProblem(error instanceof Error ? error.message : String(error));
  }
}

async function rollBack(): Promise<void> {
  try {
    const drives = shown?.versions.find((one) => one.state === "drives");
    await ask(`/api/rollback?version=${drives?.version}`, "POST");
    showProblem("");
    await loadTraining();
  } catch (error) {
    showProblem(error instanceof Error ? error.message : String(error));
  }
}

function showVersions(versions: TrainingVersion[]): void {
  const percent = (share: number | null) => (share === null ? "" : `${Math.round(100 * share)} %`);
  const rows = versions.toReversed().map((one) => {
    const row = document.createElement("tr");
    const round = one.round === null ? "" : String(one.round);
    const cells = [one.version.slice(0, 8), one.state, percent(one.alone), percent(one.corrected), String(one.episodes), round];
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  });
  element("t-versions").querySelector("tbody")?.replaceChildren(...rows);
  const loaded = versions.filter((one) => one.state === "drives" || one.state === "kept");
  element<HTMLButtonElement>("t-rollback").disabled = !may || loaded.length < 2;
}

function draw(): void {
  if (shown === null || element("training").hidden) return;
  const driven = shown.versions.filter((one) => one.episodes > 0);
  const shares = clearedCanvas("t-shares");
  if (shares !== null) {
    drawSeries(shares, driven.map((one) => one.alone ?? 0), "good", 1);
    drawSeries(shares, driven.map((one) => one.corrected ?? 0), "human", 1);
  }
  const said = driven.map((one) => `${one.version.slice(0, 8)}: ${one.alone} alone, ${one.corrected} corrected`);
  element("t-shares").setAttribute("aria-label", said.length > 0 ? said.join("; ") : "No episode yet");
  const loss = clearedCanvas("t-loss");
  const all = shown.rounds.flatMap((round) => round.loss);
  if (loss !== null && all.length > 0) {
    const top = Math.max(...all, 1e-9);
    element("t-top").textContent = `0 to ${top.toPrecision(3)}`;
    let first = 0;
    for (const round of shown.rounds) {
      drawSeries(loss, round.loss, "policy", top, first, all.length);
      first += round.loss.length;
    }
  }
  element("t-loss").setAttribute("aria-label", all.length > 0 ? `Loss from ${all[0].toFixed(4)} to ${all[all.length - 1].toFixed(4)}` : "No loss yet");
}

/** A line with points at values 0 to `top`; `first`, `count`: where it lies among all values of the chart. */
function drawSeries(canvas: NonNullable<ReturnType<typeof clearedCanvas>>, values: number[], name: string, top: number, first = 0, count = values.length): void {
  const { draw, width, height } = canvas;
  [draw.strokeStyle, draw.fillStyle, draw.lineWidth] = [color(name), color(name), 2];
  const points = values.map((value, i) => [((first + i + 0.5) * width) / count, 8 + (height - 16) * (1 - value / top)] as const);
  draw.beginPath();
  points.forEach(([x, y]) => draw.lineTo(x, y));
  draw.stroke();
  for (const [x, y] of points) {
    draw.beginPath();
    draw.arc(x, y, count > 40 ? 1.5 : 4, 0, 2 * Math.PI);
    draw.fill();
  }
}

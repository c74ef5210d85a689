// Who acted in each step, how far it was from the policy's proposal, what is planned and what was executed.

import { clearedCanvas, color, element } from "./dom";

const ACTOR_COLORS: Record<string, string> = { e: "accent", p: "policy", h: "human", "-": "hold" };
const DIMENSIONS = ["x", "y", "z", "turn x", "turn y", "turn z", "gripper"];
const LABEL_WIDTH = 62;

/** `at`: a step to mark; `steps`: the width of the whole strip. */
export function drawStrip(id: string, actors: string, disagreement: number[], steps: number, at: number | null): void {
  const canvas = clearedCanvas(id);
  if (canvas === null) return;
  const { draw, width, height } = canvas;
  const step = width / Math.max(1, steps, actors.length);
  [...actors].forEach((actor, i) => {
    draw.fillStyle = color(ACTOR_COLORS[actor] ?? "hold");
    draw.fillRect(i * step, height - 14, Math.max(1, step + 0.5), 14);
  });
  draw.strokeStyle = color("curve");
  draw.lineWidth = 1.5;
  draw.beginPath();
  disagreement.forEach((value, i) => {
    const y = (height - 18) * (1 - Math.min(value, 2) / 2) + 2;
    draw.lineTo((i + 0.5) * step, y);
  });
  draw.stroke();
  if (at !== null) {
    draw.fillStyle = color("focus");
    draw.fillRect(Math.min(width - 2, at * step), 0, 2, height);
  }
  const human = [...actors].filter((actor) => actor === "h").length;
  element(id).setAttribute("aria-label", `${actors.length} steps, ${human} of them driven by a person`);
}

/** One row per action dimension, one column per planned action: blue below zero, orange above. */
export function drawPlan(planned: number[][], executed: number[]): void {
  const canvas = clearedCanvas("plan");
  if (canvas === null) return;
  const { draw, width, height } = canvas;
  const rows = executed.length;
  const columns = [executed, ...planned];
  const [cell, row] = [(width - LABEL_WIDTH) / Math.max(columns.length, 9), height / Math.max(1, rows)];
  draw.font = "12px system-ui, sans-serif";
  draw.textBaseline = "middle";
  for (let dim = 0; dim < rows; dim++) {
    draw.globalAlpha = 1;
    draw.fillStyle = color("quiet");
    draw.fillText(rows === DIMENSIONS.length ? DIMENSIONS[dim] : `${dim}`, 0, (dim + 0.5) * row);
    columns.forEach((action, i) => {
      const value = action[dim] ?? 0;
      draw.globalAlpha = Math.min(1, 0.06 + Math.abs(value));
      draw.fillStyle = color(value < 0 ? "policy" : "human");
      draw.fillRect(LABEL_WIDTH + i * cell + (i > 0 ? 4 : 0), dim * row + 1, cell - 2, row - 2);
    });
  }
  draw.globalAlpha = 1;
  const text = planned.length === 0 ? "No plan" : `The last action, then ${planned.length} planned ones, one row per dimension`;
  element("plan").setAttribute("aria-label", text);
}

/** The first three dimensions of the executed actions. */
export function drawCurves(id: string, actions: number[][]): void {
  const canvas = clearedCanvas(id);
  if (canvas === null || actions.length === 0) return;
  const { draw, width, height } = canvas;
  ["policy", "human", "good"].forEach((name, dim) => {
    draw.strokeStyle = color(name);
    draw.beginPath();
    actions.forEach((action, i) => draw.lineTo(((i + 0.5) * width) / actions.length, (height / 2) * (1 - (action[dim] ?? 0) * 0.9)));
    draw.stroke();
  });
}

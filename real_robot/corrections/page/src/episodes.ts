// The page of the episodes: a filtered list; one episode's frames, curves and labels.

import { drawCurves, drawStrip } from "./charts";
import { element, onClick, showProblem } from "./dom";
import { ask, type Episode, type Row } from "./protocol";

interface List {
  total: number;
  tasks: string[];
  episodes: Row[];
}

let rows: Row[] = [];
let chosen: Episode | null = null;
let playing: ReturnType<typeof setInterval> | null = null;
let queue = Promise.resolve(); // episodes opened and changed, one after the other
let opening = 0; // episodes asked for and not yet shown
// numbers of the last requests, so that a late answer is not shown
let listAsked = 0;
let frameAsked = 0;

export function startEpisodes(): void {
  for (const id of ["f-task", "f-outcome", "f-who", "f-deleted"]) element(id).addEventListener("change", () => void load());
  element("filters").addEventListener("submit", (event) => event.preventDefault());
  onClick("more", () => void load(rows.length));
  onClick("d-play", play);
  element("d-step").addEventListener("input", () => showAt());
  element("d-camera").addEventListener("change", () => showAt());
  for (const what of ["label/success", "label/failure", "delete", "undo"]) {
    onClick(`d-${what.split("/").pop()}`, () => change(what));
  }
  onClick("d-from", () => change(`success_from?step=${stepShown()}&shown=${spanShown()}`));
  onClick("d-start", () => change(`trim?first=${stepShown()}&end=${chosen?.steps}&shown=${spanShown()}`, 0));
  onClick("d-end", () => change(`trim?first=0&end=${stepShown()}&shown=${spanShown()}`));
  onClick("d-split", () => change(`split?at=${stepShown()}&shown=${spanShown()}`, 0));
  addEventListener("resize", () => showAt());
}

export function load(first = 0): Promise<void> {
  return attempt(() => readList(first));
}

async function readList(first = 0): Promise<void> {
  const number = ++listAsked;
  const query = new URLSearchParams({
    task: select("f-task").value,
    outcome: select("f-outcome").value,
    who: select("f-who").value,
    deleted: String(element<HTMLInputElement>("f-deleted").checked),
    first: String(first),
  });
  const list = await ask<List>(`/api/episodes?${query}`);
  if (number !== listAsked) return;
  rows = first === 0 ? list.episodes : [...rows, ...list.episodes];
  const known = new Set([...select("f-task").options].map((option) => option.value));
  for (const task of list.tasks) if (!known.has(task)) select("f-task").add(new Option(task, task));
  element("count").textContent = `${list.total} episodes`;
  element("empty").hidden = rows.length > 0;
  element("more").hidden = rows.length >= list.total;
  showList();
}

function showList(): void {
  const body = rows.map((row) => {
    const line = document.createElement("tr");
    line.classList.toggle("chosen", row.id === chosen?.id);
    const open = document.createElement("button");
    open.type = "button";
    open.textContent = recorded(row.id);
    open.addEventListener("click", () => choose(row.id));
    const first = document.createElement("td");
    first.append(open);
    line.append(first, cell(row.task), result(row), cell(row.span === null ? String(row.steps) : `${row.steps} of ${row.recorded_steps}`), cell(`${Math.round(100 * row.human_share)} %`));
    return line;
  });
  element("list").querySelector("tbody")?.replaceChildren(...body);
}

/** The episode shown before can no longer be changed, lest a click meant for this one reach it. */
export function choose(id: string): void {
  opening += 1;
  element("detail").hidden = true;
  inTurn(async () => {
    opening -= 1;
    chosen = null;
    const episode = await ask<Episode>(`/api/episodes/${id}`);
    element<HTMLInputElement>("d-step").value = "0";
    showEpisode(episode);
    element("d-title").focus();
  });
}

/** Changes the episode that the one before left. `observation`: to show then. */
function change(what: string, observation: number | null = null): void {
  inTurn(async () => {
    if (chosen === null) return;
    const { id } = chosen;
    const changed = await ask<Episode>(`/api/episodes/${id}/${what}`, "POST").catch(async (refused: unknown) => {
      showEpisode(await ask<Episode>(`/api/episodes/${id}`)); // somebody else may have changed it
      throw refused;
    });
    if (observation !== null) element<HTMLInputElement>("d-step").value = String(observation);
    showEpisode(changed);
    await readList();
  });
}

function inTurn(one: () => Promise<void>): void {
  queue = queue.then(() => attempt(one));
}

function showEpisode(episode: Episode): void {
  chosen = episode;
  element("detail").hidden = opening > 0;
  element("d-title").textContent = `${episode.task}: ${episode.instruction}`;
  element<HTMLInputElement>("d-step").max = String(episode.observation_steps.length - 1);
  const cameras = select("d-camera");
  if ([...cameras.options].map((option) => option.value).join() !== episode.cameras.join()) {
    cameras.replaceChildren(...episode.cameras.map((name) => new Option(name, name)));
  }
  const changed = episode.success === episode.recorded_success ? "" : ", relabelled";
  element("d-facts").textContent =
    `${episode.success ? "Success" : "Failure"}${changed}${episode.deleted ? ", deleted" : ""}; ` +
    `${stepsOf(episode)} steps, ${Math.round(100 * episode.human_share)} % by a person, interventions: ${episode.interventions}` +
    `${episode.operators.length ? ` (${[...new Set(episode.operators)].join(", ")})` : ""}; policy ${episode.policy.slice(0, 8)}.`;
  const lines = episode.history.map((one) => {
    const when = new Date(1000 * one.time_s).toLocaleString();
    const what = one.undoes === null ? `${one.key}: ${String(one.value)}` : `undone: ${one.key}`;
    return Object.assign(document.createElement("li"), { textContent: `${what} (${one.author}, ${when})` });
  });
  element("d-history").replaceChildren(...lines);
  showList();
  showAt();
}

function showAt(): void {
  if (chosen === null || element("episodes").hidden) return;
  const index = Number(element<HTMLInputElement>("d-step").value);
  const step = stepShown();
  element("d-at").textContent = `step ${step}`;
  const labels = !element<HTMLButtonElement>("d-delete").disabled; // its role may
  for (const id of ["d-start", "d-end", "d-split"]) {
    element<HTMLButtonElement>(id).disabled = !labels || step === 0 || step >= chosen.steps;
  }
  element<HTMLButtonElement>("d-from").disabled = !labels || step === 0;
  drawStrip("d-strip", chosen.actors, chosen.disagreement, chosen.steps, step);
  drawCurves("d-curves", chosen.action);
  if (chosen.cameras.length > 0) void showFrame(chosen.id, select("d-camera").value || chosen.cameras[0], index);
}

/** The control step before which the shown frame was taken. */
function stepShown(): number {
  return chosen?.observation_steps[Number(element<HTMLInputElement>("d-step").value)] ?? 0;
}

/** The recorded steps that are shown, from which steps are counted. */
function spanShown(): string {
  return (chosen?.span ?? [0, chosen?.steps]).join("-");
}

function stepsOf(row: Row): string {
  return row.span === null ? String(row.steps) : `${row.span[0]} to ${row.span[1]} of ${row.recorded_steps}`;
}

async function showFrame(id: string, camera: string, index: number): Promise<void> {
  const number = ++frameAsked;
  const answer = await fetch(`/api/episodes/${id}/frames/${camera}/${index}`);
  if (!answer.ok) return;
  const image = await createImageBitmap(await answer.blob());
  if (number !== frameAsked) return;
  const canvas = element<HTMLCanvasElement>("d-frame");
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext("2d")?.drawImage(image, 0, 0);
}

function play(): void {
  const slider = element<HTMLInputElement>("d-step");
  if (playing !== null || chosen === null) return stop();
  if (Number(slider.value) >= Number(slider.max)) slider.value = "0";
  const start = performance.now() / 1000 - (chosen.observation_steps[Number(slider.value)] ?? 0) / chosen.control_hz;
  element("d-play").textContent = "Stop";
  playing = setInterval(() => {
    if (chosen === null) return stop();
    const step = (performance.now() / 1000 - start) * chosen.control_hz;
    const index = chosen.observation_steps.findLastIndex((at) => at <= step);
    slider.value = String(Math.max(0, index));
    showAt();
    if (index >= Number(slider.max)) stop();
  }, 50);
}

function stop(): void {
  if (playing !== null) clearInterval(playing);
  playing = null;
  element("d-play").textContent = "Play";
}

async function attempt(work: () => Promise<void>): Promise<void> {
  try {
    await work();
    showProblem("");
  } catch (error) {
    showProblem(error instanceof Error ? error.message : String(error));
  }
}

function cell(text: string): HTMLTableCellElement {
  return Object.assign(document.createElement("td"), { textContent: text });
}

function result(row: Row): HTMLTableCellElement {
  if (row.damaged) return cell("damaged file");
  const text = row.success ? "success" : "failure";
  const td = cell(row.success === row.recorded_success ? text : `${text} (relabelled)`);
  td.className = text;
  return td;
}

/** When an episode was stored: its id, a ULID, begins with the time in milliseconds. */
export function recorded(id: string): string {
  const digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
  const ms = [...id.slice(0, 10)].reduce((sum, digit) => 32 * sum + digits.indexOf(digit), 0);
  return new Date(ms).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
}

const select = (id: string) => element<HTMLSelectElement>(id);

// The imagined robot beside the true one: what the person holds goes out; the moments that come in are kept and shown.

import { isTyping, readDevices, watchDevices } from "./devices";
import { clearedCanvas, color, element, onClick, setText, showProblem } from "./dom";
import { NO_SESSION, SESSION_ENDED } from "./protocol";

/** As vla_rl/drive/session.py sends them. */
interface Episode {
  type: "episode";
  number: number;
  episode: number;
  episodes: number;
  instruction: string;
  rows: string[];
  cameras: string[];
  control_hz: number;
  max_steps: number;
  chunk: number;
  reference_image_difference: number;
  diverged_mm: number;
  can_rewind: boolean;
}

interface Moment {
  type: "moment";
  number: number;
  step: number;
  image: string;
  error: number;
  imagined_success: boolean;
  true_success: boolean | null;
  difference: number | null;
  object_mm: number | null;
  divergence: "image" | "object" | null;
  ended: string;
}

const HEARTBEAT_MS = 33;
const RECONNECT_MS = 1000;
const REPLACED = 4409;
const HIGHEST = 4; // of the chart, in reference values
const ROWS: Record<string, string> = { true: "True simulator", imagined: "Imagined", difference: "Difference, three times" };
const HOTKEYS: Record<string, string> = { KeyN: "next", KeyB: "rewind", Backspace: "again" };

let socket: WebSocket | null = null;
let episode: Episode | null = null;
let moments: Moment[] = [];
let drawn = 0; // images that were asked for; only the newest is shown

function connect(): void {
  socket = new WebSocket(`${location.origin.replace("http", "ws")}/ws/drive`);
  socket.onopen = () => showProblem("");
  socket.onmessage = (event) => receive(JSON.parse(event.data as string));
  socket.onclose = (event) => {
    if (event.code === NO_SESSION) return showProblem(SESSION_ENDED);
    if (event.code === REPLACED) return showProblem("This page is open in another window. Reload it to go on here.");
    showProblem("The connection to the world model is lost. Connecting again.");
    setTimeout(connect, RECONNECT_MS);
  };
}

function send(message: object): void {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function receive(message: Episode | Moment | { type: "rewound"; step: number } | { type: "refused"; reason: string }): void {
  if (message.type === "refused") return showProblem(message.reason);
  if (message.type === "episode") {
    [episode, moments] = [message, []];
    showEpisode(message);
  } else if (message.type === "rewound") {
    moments.length = message.step + 1;
    moments[message.step].ended = "";
    show(message.step);
  } else if (message.number === episode?.number) {
    moments[message.step] = message;
    show(message.step);
  }
  showProblem("");
}

function showEpisode(about: Episode): void {
  setText(element("instruction"), about.instruction);
  setText(element("about"),
    `Start ${about.episode + 1} of ${about.episodes}. The model imagines ${about.chunk} steps at a time, each time from its own prediction. ` +
    "Uncertainty is the model's own estimate of its error. " +
    (about.rows.length === 1 ? "Without a simulator there is nothing to compare with." :
      `They have diverged where the images differ by more than ${about.reference_image_difference.toFixed(1)} of 255 in the mean, ` +
      `which at most 5 % of single predictions do, or the object is ${about.diverged_mm} mm from its true place.`));
  element("key-difference").hidden = element("key-diverged").hidden = about.rows.length === 1;
  element("images").replaceChildren(...about.rows.map((row) => {
    const figure = document.createElement("figure");
    const canvas = Object.assign(document.createElement("canvas"), { id: `image-${row}` });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${ROWS[row]}: cameras ${about.cameras.join(", ")}`);
    figure.append(canvas, Object.assign(document.createElement("figcaption"), { textContent: ROWS[row] }));
    return figure;
  }));
}

/** What had happened after this many steps. */
function show(step: number): void {
  const moment = moments[step];
  if (episode === null || moment === undefined) return;
  const [last, slider] = [moments.length - 1, element<HTMLInputElement>("at")];
  [slider.max, slider.value] = [String(last), String(step)];
  setText(element("at-value"), String(step));
  element<HTMLButtonElement>("rewind").disabled = step === last || !episode.can_rewind;
  const ended = moments[last].ended;
  element("mode").dataset.mode = ended !== "" ? "ended" : driving() ? "human" : "hold";
  setText(element("mode"), ended !== "" ? `Over: ${ended}` : driving() ? "You drive" : "Hold Shift and drive");
  const seconds = (step / episode.control_hz).toFixed(1);
  setText(element("clock"), `Step ${step} of at most ${episode.max_steps}, ${seconds} s${step < last ? `; it is at step ${last}` : ""}`);
  setText(element("outcomes"), outcomes(episode, step));
  drawChart(episode, step);
  void drawImages(episode, moment);
}

function outcomes(about: Episode, step: number): string {
  const seen = moments.slice(0, step + 1);
  const first = (met: (moment: Moment) => boolean) => {
    const at = seen.findIndex(met);
    return at < 0 ? "no success so far" : `success at step ${at}`;
  };
  const now = moments[step];
  const texts = [`Imagined: ${first((one) => one.imagined_success)}, uncertainty ${now.error.toFixed(1)} times the reference.`];
  if (now.difference === null) return texts[0];
  const diverged = seen.find((one) => one.divergence !== null);
  texts.unshift(`True: ${first((one) => one.true_success === true)}.`);
  texts.push(`The images differ by ${now.difference.toFixed(1)} of 255 (reference: ${about.reference_image_difference.toFixed(1)})${now.object_mm === null ? "" : `, the object by ${now.object_mm.toFixed(0)} mm`}.`);
  texts.push(diverged === undefined ? "They have not diverged." : `They diverged at step ${diverged.step} (${diverged.divergence}).`);
  return texts.join(" ");
}

/** Uncertainty and difference over steps, both in reference values, up to HIGHEST; `at`: the step that is shown. */
function drawChart(about: Episode, at: number): void {
  const canvas = clearedCanvas("chart");
  if (canvas === null) return;
  const { draw, width, height } = canvas;
  const x = (step: number) => 4 + (step * (width - 8)) / Math.max(1, about.max_steps);
  const y = (value: number) => 4 + (height - 8) * (1 - Math.min(value, HIGHEST) / HIGHEST);
  const vertical = (step: number, style: string) => {
    draw.fillStyle = color(style);
    draw.fillRect(x(step) - 1, 0, 2, height);
  };
  draw.fillStyle = color("hold");
  draw.fillRect(0, y(1), width, 1);
  const diverged = moments.find((one) => one.divergence !== null);
  if (diverged !== undefined) vertical(diverged.step, "bad");
  if (at < moments.length - 1) vertical(at, "focus");
  const line = (value: (moment: Moment) => number, style: string) => {
    [draw.strokeStyle, draw.lineWidth] = [color(style), 2];
    draw.beginPath();
    for (const one of moments) draw.lineTo(x(one.step), y(value(one)));
    draw.stroke();
  };
  line((one) => one.error, "policy");
  if (about.rows.length > 1) line((one) => (one.difference ?? 0) / about.reference_image_difference, "human");
  const last = moments[moments.length - 1];
  const difference = last.difference === null ? "" : `, difference ${(last.difference / about.reference_image_difference).toFixed(1)}`;
  element("chart").setAttribute("aria-label", `${last.step} steps; at the last one uncertainty ${last.error.toFixed(1)}${difference} times the reference`);
}

/** The image's rows, each with all cameras side by side: here one canvas per row, cameras below each other. */
async function drawImages(about: Episode, moment: Moment): Promise<void> {
  const asked = ++drawn;
  const data = Uint8Array.from(atob(moment.image), (character) => character.charCodeAt(0));
  const image = await createImageBitmap(new Blob([data], { type: "image/jpeg" }));
  if (asked === drawn) {
    const [width, height] = [image.width / about.cameras.length, image.height / about.rows.length];
    about.rows.forEach((row, i) => {
      const canvas = element<HTMLCanvasElement>(`image-${row}`);
      [canvas.width, canvas.height] = [width, height * about.cameras.length];
      canvas.dataset.step = String(moment.step);
      about.cameras.forEach((_, j) =>
        canvas.getContext("2d")?.drawImage(image, j * width, i * height, width, height, 0, j * height, width, height));
    });
  }
  image.close();
}

const driving = () => readDevices().deadman;
const at = () => Number(element<HTMLInputElement>("at").value);

function start(): void {
  const input = () => send({ type: "input", ...readDevices() });
  const changed = () => {
    input();
    show(driving() ? moments.length - 1 : at());
  };
  watchDevices(changed, () => undefined);
  setInterval(() => driving() && input(), HEARTBEAT_MS);
  element("at").addEventListener("input", () => show(at()));
  onClick("rewind", () => send({ type: "rewind", step: at() }));
  onClick("again", () => send({ type: "begin", episode: episode?.episode ?? 0 }));
  onClick("next", () => send({ type: "begin", episode: (episode?.episode ?? -1) + 1 }));
  addEventListener("keydown", (event) => {
    const id = HOTKEYS[event.code];
    if (id === undefined || isTyping(event) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!element<HTMLButtonElement>(id).disabled) element(id).click();
  });
  const redraw = () => show(at());
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  connect();
}

start();

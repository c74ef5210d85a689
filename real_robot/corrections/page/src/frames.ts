// Frames of the robot's cameras: one binary message each, decoded and drawn; only the newest counts.

import { color, element } from "./dom";
import { NO_SESSION, type Line, type Paths } from "./protocol";

const HEADER_BYTES = 16; // capture time (float64), number (uint32), camera (uint8), padding; little-endian
const RECONNECT_MS = 1000;
const KEPT_LATENCIES = 3000;

/** Milliseconds from capture to drawing of the last frames; read by benchmarks. */
export const latencies: number[] = [];

export function showCameras(names: string[]): void {
  const box = element("cameras");
  if (box.childElementCount === names.length) return;
  box.replaceChildren(
    ...names.map((name, index) => {
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      canvas.id = `camera-${index}`;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Camera ${name}`);
      const caption = document.createElement("figcaption");
      caption.textContent = name;
      const lines = document.createElement("canvas");
      lines.id = `lines-${index}`;
      lines.className = "lines";
      lines.setAttribute("aria-hidden", "true");
      figure.append(canvas, lines, caption);
      return figure;
    }),
  );
}

export function receiveFrames(): void {
  const socket = new WebSocket(`${location.origin.replace("http", "ws")}/ws/frames`);
  socket.binaryType = "arraybuffer";
  const newest = new Map<number, number>();
  socket.onmessage = async (event) => {
    const data = event.data as ArrayBuffer;
    const view = new DataView(data);
    const [takenMs, number, camera] = [1000 * view.getFloat64(0, true), view.getUint32(8, true), view.getUint8(12)];
    newest.set(camera, number);
    const image = await decode(data.slice(HEADER_BYTES));
    if (newest.get(camera) === number) draw(camera, image, takenMs);
    image.close();
  };
  socket.onclose = (event) => event.code !== NO_SESSION && setTimeout(receiveFrames, RECONNECT_MS);
}

/** WebCodecs, where the browser has it, is faster. */
async function decode(data: ArrayBuffer): Promise<ImageBitmap | VideoFrame> {
  const type = "image/jpeg";
  if (!("ImageDecoder" in window)) return createImageBitmap(new Blob([data], { type }));
  const decoder = new ImageDecoder({ data, type });
  const { image } = await decoder.decode();
  decoder.close();
  return image;
}

/** Over the images: what the policy plans, light, and what was executed. */
export function drawPaths(paths: Paths | null): void {
  for (const [index, lines] of document.querySelectorAll<HTMLCanvasElement>("canvas.lines").entries()) {
    const frame = element<HTMLCanvasElement>(`camera-${index}`);
    [lines.width, lines.height] = [2 * frame.width, 2 * frame.height];
    if (paths === null) continue;
    drawLine(lines, paths.executed[index] ?? [], color("executed-line"), 0);
    drawLine(lines, paths.planned[index] ?? [], color("planned-line"), 7);
  }
}

/** `dot`: radius at its end. A dark edge keeps it visible on every ground. */
function drawLine(canvas: HTMLCanvasElement, line: Line, stroke: string, dot: number): void {
  const draw = canvas.getContext("2d");
  if (draw === null || line.length < 2) return;
  const points = line.map(([right, down]) => [right * canvas.width, down * canvas.height] as const);
  const [endX, endY] = points[points.length - 1];
  [draw.lineJoin, draw.lineCap] = ["round", "round"];
  for (const [style, width] of [["rgb(0 0 0 / 55%)", 8], [stroke, 4]] as const) {
    [draw.strokeStyle, draw.fillStyle, draw.lineWidth] = [style, style, width];
    draw.beginPath();
    points.forEach(([x, y]) => draw.lineTo(x, y));
    draw.stroke();
    draw.beginPath();
    draw.arc(endX, endY, dot > 0 ? dot + width / 2 - 2 : 0, 0, 2 * Math.PI);
    draw.fill();
  }
}

function draw(camera: number, image: ImageBitmap | VideoFrame, takenMs: number): void {
  const canvas = document.getElementById(`camera-${camera}`) as HTMLCanvasElement | null;
  if (canvas === null) return;
  const [width, height] = "displayWidth" in image ? [image.displayWidth, image.displayHeight] : [image.width, image.height];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  canvas.getContext("2d")?.drawImage(image, 0, 0);
  latencies.push(performance.timeOrigin + performance.now() - takenMs);
  if (latencies.length > KEPT_LATENCIES) latencies.shift();
}

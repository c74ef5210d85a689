// The elements of index.html by their id.

export function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element ${id}`);
  return found as T;
}

export function onClick(id: string, act: () => void): void {
  element(id).addEventListener("click", act);
}

/** Unchanged text is left alone, so that it is not read aloud again. */
export function setText(target: HTMLElement, text: string): void {
  if (target.textContent !== text) target.textContent = text;
}

/** A canvas as large as it is shown, in device pixels, cleared; null while it is not shown. */
export function clearedCanvas(id: string): { draw: CanvasRenderingContext2D; width: number; height: number } | null {
  const canvas = element<HTMLCanvasElement>(id);
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const draw = canvas.getContext("2d");
  if (draw === null || width === 0) return null;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  return { draw, width, height };
}

export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function showProblem(text: string): void {
  const problem = element("problem");
  problem.textContent = text;
  problem.hidden = text === "";
}

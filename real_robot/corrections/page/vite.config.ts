import { readFileSync } from "node:fs";
import { defineConfig } from "vite";

/** `<!-- include FILE -->` in a page stands for the file: what several pages have in common. */
const include = {
  name: "include",
  transformIndexHtml: {
    order: "pre" as const,
    handler: (html: string) =>
      html.replace(/^( *)<!-- include (\S+) -->\n/gm, (_, indent: string, file: string) =>
        readFileSync(file, "utf-8").replace(/^/gm, indent).trimEnd() + "\n"),
  },
};

// The build is committed and shipped in the wheel: names without hashes keep its history readable.
export default defineConfig({
  plugins: [include],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      input: { page: "index.html", fleet: "fleet.html", drive: "drive.html" },
      output: { entryFileNames: "assets/[name].js", chunkFileNames: "assets/[name].js", assetFileNames: "assets/[name][extname]" },
    },
  },
});

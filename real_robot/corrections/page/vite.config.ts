import { defineConfig } from "vite";

// The build is committed and shipped in the wheel: names without hashes keep its history readable.
export default defineConfig({
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

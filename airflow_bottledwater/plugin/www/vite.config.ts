import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// Airflow's own front end has these already (airflow/ui/src/main.tsx): one React, one theme, and a small file
const host: Record<string, string> = {
  react: "React",
  "react-dom": "ReactDOM",
  "react/jsx-runtime": "ReactJSXRuntime",
  "react-router-dom": "ReactRouterDOM",
  "@chakra-ui/react": "ChakraUI",
};

export default defineConfig(({ mode }) => ({
  plugins: [react()],
  define: mode === "test" ? {} : { "process.env.NODE_ENV": JSON.stringify("production") },
  build: {
    outDir: "built",
    // the icons are there, too
    emptyOutDir: false,
    // as Airflow loads it: one file, whose component is the global AirflowPlugin
    lib: { entry: "src/main.tsx", formats: ["umd"], name: "AirflowPlugin", fileName: () => "main.umd.cjs" },
    rollupOptions: { external: Object.keys(host), output: { globals: host } },
  },
  test: { environment: "happy-dom", include: ["tests/**/*.test.ts", "tests/**/*.test.tsx"] },
}));

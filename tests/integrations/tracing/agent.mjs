// An agent behind HTTP, without packages: it takes the caller's `traceparent` and sends its spans as OTLP/JSON by fetch.
import { randomBytes } from "node:crypto";
import { createServer } from "node:http";

const forecasts = { Oslo: "snow", Lima: "sun" };

function value(given) {
  return typeof given === "number" ? { intValue: String(given) } : { stringValue: given };
}

function makeSpan(traceId, parentSpanId, name, attributes, failure) {
  const now = BigInt(Date.now()) * 1000000n;
  return {
    traceId, parentSpanId, spanId: randomBytes(8).toString("hex"), name,
    startTimeUnixNano: String(now), endTimeUnixNano: String(now + 2000000n),
    attributes: Object.entries(attributes).map(([key, given]) => ({ key, value: value(given) })),
    status: failure ? { code: 2, message: failure } : {},
  };
}

function think(question, traceId, parentId) {
  const request = makeSpan(traceId, parentId, "POST /ask", {});
  const below = (name, attributes, failure) => makeSpan(traceId, request.spanId, name, attributes, failure);
  const city = question.match(/Oslo|Lima|Atlantis/)?.[0];
  const spans = [request, below("chat small-model", {
    "gen_ai.operation.name": "chat", "gen_ai.request.model": "small-model",
    "gen_ai.usage.input_tokens": 40, "gen_ai.usage.output_tokens": question.length,
  })];
  if (city) {
    spans.push(below("execute_tool weather", {
      "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather",
      "gen_ai.tool.call.arguments": JSON.stringify({ city }), "gen_ai.tool.call.result": forecasts[city] ?? "",
    }, forecasts[city] ? undefined : "no such city"));
  }
  return { answer: city in forecasts ? `Expect ${forecasts[city]}.` : "It will be fine.", spans };
}

async function send(spans) {
  const body = JSON.stringify({ resourceSpans: [{ scopeSpans: [{ spans }] }] });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${process.env.OTEL_EXPORTER_OTLP_ENDPOINT}/v1/traces`, { method: "POST", headers, body });
  if (!answer.ok) console.error(`spans were refused: ${answer.status}`);
}

const server = createServer((request, response) => {
  const [, traceId, parentId] = request.headers.traceparent.split("-");
  let body = "";
  request.on("data", (part) => { body += part; });
  request.on("end", () => {
    const { answer, spans } = think(JSON.parse(body).question, traceId, parentId);
    response.end(JSON.stringify({ answer }));
    setImmediate(send, spans); // After the answer, as exporters do.
  });
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));

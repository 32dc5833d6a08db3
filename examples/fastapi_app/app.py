"""A service that answers questions about a shop, as many are: FastAPI in front, OpenAI behind.

uvicorn app:app
"""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI, HTTPException
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

RULES = """You answer customers of a shop in one short sentence.
Delivery takes three days. Returns are free within 30 days. The shop opens at 9 and closes at 18.
Gift cards are valid for two years. If you do not know the answer, say so."""

app = FastAPI(title="Shop assistant")
client = AsyncOpenAI()


class Question(BaseModel):
    question: str = Field(min_length=1)
    language: Literal["en", "de"] = "en"


class Answer(BaseModel):
    answer: str
    model: str


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/ask")
async def ask(body: Question) -> Answer:
    if len(body.question) > 500:
        raise HTTPException(413, "ask a shorter question")
    reply = await client.chat.completions.create(
        model="gpt-5-mini",
        messages=[
            {"role": "system", "content": f"{RULES} Answer in the language {body.language!r}."},
            {"role": "user", "content": body.question},
        ],
    )
    return Answer(answer=reply.choices[0].message.content or "", model=reply.model)

"""An HTTP front for clients of OpenAI's API. It serves completions and chats.

The model name in a request selects the base model, an adapter or an adapter's snapshot.
The front needs the extra `openai` of the package (fastapi and uvicorn).
"""

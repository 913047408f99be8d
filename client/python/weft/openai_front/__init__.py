"""A front for clients of OpenAI's API: completions and chats of the base model, of
adapters and of their snapshots, by name.

It needs the extra `openai` of the package (fastapi and uvicorn).
"""

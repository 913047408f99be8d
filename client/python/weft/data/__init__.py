"""Turns records of text into token ids for a training loop.

tokenizer = weft.data.ModelTokenizer.from_folder("models/smollm2-135m-instruct")
encode = weft.data.Encoder(tokenizer)
for example in weft.data.Dataset("chats.jsonl", encode):
    adapter.forward_backward([example.datum()])

It needs the packages `tokenizers` and, for chats, `jinja2`, which the extras `cli` and
`train` install. It does not pack sequences, because the server does.
"""

from weft.data.chat import ChatTemplate, Message
from weft.data.dataset import BadRecord, Dataset, log_bad_record
from weft.data.encode import Encoder, Example, LossOn, Pair
from weft.data.sources import Located, Record, Source, read
from weft.data.tokenizer import ModelTokenizer

__all__ = [
    "BadRecord",
    "ChatTemplate",
    "Dataset",
    "Encoder",
    "Example",
    "Located",
    "LossOn",
    "Message",
    "ModelTokenizer",
    "Pair",
    "Record",
    "Source",
    "log_bad_record",
    "read",
]

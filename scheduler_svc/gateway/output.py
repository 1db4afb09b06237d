"""What one stream has generated: ids, the text that became final, and whether a stop rule has ended it. Pure.

All of an output's ids pass through here one by one, so a stop in the middle of a step that brings several tokens cuts
ids, text and counts at the same place. Pending ids and text are one buffer: whoever writes next takes all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.gateway.detokenizer import Detokenizer
from scheduler_svc.gateway.stopper import StopMatch, Stopper


class EndKind(Enum):
    """How an output ended well."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an output. With STOP and neither match: the model's own end-of-sequence id."""

    kind: EndKind
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """When an output ends by itself."""

    max_tokens: int
    """Most tokens, at least 1."""
    min_tokens: int = 0
    """Stop ids count only behind this many tokens, stop strings from the token that brings the count there."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the output: the model's (unless ignored) and the request's."""
    own_stop_ids: frozenset[int] = frozenset()
    """Those of the request, to be named when they match."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(slots=True)
class Piece:
    """Output that has not been taken before."""

    first_index: int
    token_ids: list[int]
    text: str


@dataclass(slots=True)
class Output:
    """The state of one output. `ending` is None while it goes on; behind it nothing is added."""

    detokenizer: Detokenizer
    rules: StopRules
    literal: Callable[[int], str | None] = lambda _: None
    """Text of a special token, which a detokenizer leaves out."""
    token_ids: list[int] = field(default_factory=list)
    """All ids so far, the one that ended the output included."""
    ending: Ending | None = None
    num_taken: int = 0
    _text: list[str] = field(default_factory=list)
    _stopper: Stopper = field(init=False)

    def __post_init__(self) -> None:
        self._stopper = Stopper(self.rules.stop, include_stop=self.rules.include_stop)

    def push(self, token_id: int) -> None:
        """Add the next id. Does nothing once the output has ended."""
        if self.ending is not None:
            return
        self.token_ids.append(token_id)
        count, rules = len(self.token_ids), self.rules
        if token_id in rules.stop_ids and count > rules.min_tokens:
            self._end_by_token(token_id)
            return
        self._add(self.detokenizer.push(token_id))
        if self.ending is None and count >= rules.max_tokens:
            self.end(Ending(EndKind.LENGTH))

    def end(self, ending: Ending) -> None:
        """End the output from outside; text that was held back comes out. Does nothing if it has ended already."""
        if self.ending is None:
            self._add(self.detokenizer.finish())
        if self.ending is None:  # the last character may still have completed a stop string
            self._text.append(self._stopper.finish())
            self.ending = ending

    def end_by_last_token(self) -> None:
        """The scheduler says that the last id was a stop id."""
        last = self.token_ids[-1] if self.token_ids else None
        self.end(self._token_ending(last))

    def take(self) -> Piece | None:
        """Everything that became final since the last call; None if there is nothing."""
        if self.num_taken == len(self.token_ids) and not self._text:
            return None
        piece = Piece(self.num_taken, self.token_ids[self.num_taken :], "".join(self._text))
        self.num_taken = len(self.token_ids)
        self._text.clear()
        return piece

    def _add(self, text: str) -> None:
        armed = len(self.token_ids) >= self.rules.min_tokens
        found = self._stopper.push(text, armed=armed)
        if isinstance(found, StopMatch):
            self.ending = Ending(EndKind.STOP, stop_string=found.stop)
            found = found.text
        if found:
            self._text.append(found)

    def _end_by_token(self, token_id: int) -> None:
        if self.rules.include_stop:
            literal = self.literal(token_id)
            text = self.detokenizer.push(token_id) if literal is None else self.detokenizer.push_literal(literal)
            self._text.append(self._stopper.finish() + text)
        self.end(self._token_ending(token_id))

    def _token_ending(self, token_id: int | None) -> Ending:
        own = token_id if token_id in self.rules.own_stop_ids else None
        return Ending(EndKind.STOP, stop_token_id=own)

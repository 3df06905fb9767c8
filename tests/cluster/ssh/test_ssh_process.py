"""What messages of ssh mean."""

from __future__ import annotations

import pytest

from paceline.cluster.ssh.ssh_process import explain

STRICT = """No ED25519 host key is known for [login.alps]:22 and you have requested strict checking.
Host key verification failed.
"""
CHANGED = """@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Host key for login.alps has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("errors", "hint"),
    [
        (STRICT, "once: ssh -o StrictHostKeyChecking=ask login.alps"),
        ("Host key verification failed.\n", "accept it, once: ssh login.alps"),
    ],
)
def test_an_unknown_host_key_is_accepted_with_ssh_itself(errors: str, hint: str) -> None:
    """`paceline login` cannot: it has just failed for this reason."""
    problem = explain(errors, name="alps", host="login.alps")
    assert problem.message.startswith("ssh does not know the host key of login.alps")
    assert "fingerprint from the site" in problem.hint
    assert problem.hint.endswith(hint)
    assert "paceline login" not in problem.hint


def test_a_host_key_that_has_changed() -> None:
    problem = explain(CHANGED, name="alps", host="login.alps")
    assert problem.message == "The host key of login.alps has changed, so ssh does not connect."
    assert "Ask its administrators" in problem.hint

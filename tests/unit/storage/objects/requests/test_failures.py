import pytest
from trainsync.storage.objects.errors import (
    ObjectMissingError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from trainsync.storage.objects.requests.failures import translate

_SECRETS = "<AWSAccessKeyId>AKIAX</AWSAccessKeyId><StringToSign>AWS4-HMAC</StringToSign>?sig=hush"


def answer(status: int, code: str = "", more: str = "") -> str:
    body = f"<Error><Code>{code}</Code>{more}{_SECRETS}</Error>" if code else ""
    return f"Error performing PUT https://h/b/k?sig=hush - status code: {status} Words: {body}"


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (FileNotFoundError(answer(404)), ObjectMissingError, "there is no such object"),
        (FileNotFoundError(answer(404, "NoSuchKey")), ObjectMissingError, "no such object"),
        (FileNotFoundError("key k: hush (code: 404)"), ObjectMissingError, "no such object"),
        (FileNotFoundError(answer(404, "NoSuchBucket")), StoreRefusedError, "no such bucket"),
        (FileNotFoundError(answer(404, "NoSuchUpload")), StoreRefusedError, "404, NoSuchUpload"),
        (OSError(answer(403, "AccessDenied")), StoreRefusedError, "denied (403, AccessDenied)"),
        (OSError(answer(403)), StoreRefusedError, "access is denied (403)"),
        (OSError(answer(400, "ExpiredToken")), StoreRefusedError, "credentials have expired"),
        (OSError(answer(403, "SignatureDoesNotMatch")), StoreRefusedError, "the secret key"),
        (
            OSError(answer(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")),
            StoreRefusedError,
            "the region is wrong, it is in eu-west-1",
        ),
        (OSError(answer(301, "PermanentRedirect")), StoreRefusedError, "it is in another one"),
        (OSError(answer(503, "SlowDown")), StoreUnavailableError, "503, SlowDown"),
        (OSError(answer(409, "OperationAborted")), StoreUnavailableError, "409"),
        (OSError(answer(429)), StoreUnavailableError, "429"),
        (OSError(answer(416, "InvalidRange")), StoreRefusedError, "416, InvalidRange"),
        (OSError("failed for key k: hush (code: AccessDenied)"), StoreRefusedError, "access is"),
        (OSError("failed for key k: hush (code: 403)"), StoreRefusedError, "is denied (403)"),
        (OSError("failed for key k: hush (code: 503)"), StoreUnavailableError, "answered 503,"),
        (OSError("failed for key k: hush (code: InternalError)"), StoreUnavailableError, "failed"),
        (OSError("dns error: x"), StoreUnavailableError, "cannot be resolved"),
        (OSError("kind: TimedOut"), StoreUnavailableError, "did not answer in time"),
        (OSError("http://169.254.169.254/latest/api/token"), StoreRefusedError, "no credentials"),
        (ValueError("hush"), StoreUnavailableError, "the request failed"),
    ],
)
def test_an_error_is_one_sentence_without_what_the_server_quoted(
    error: Exception, kind: type[StoreError], why: str
) -> None:
    found = translate(error, "putting k", "s3://b/p")
    assert type(found) is kind
    assert why in str(found)
    assert str(found).startswith("s3://b/p, putting k: ")
    for secret in ("AKIAX", "AWS4", "hush", "<", "\n"):
        assert secret not in str(found)

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.names import BUCKET_URL_PATTERN
from trainsync.storage.objects import address
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.opening import StoreOptions, open_store


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("S3://bucket/", ("s3", "bucket", "")),
        ("s3://bucket/a/b/", ("s3", "bucket", "a/b")),
        ("s3://bucket/a b/ü%20&=+", ("s3", "bucket", "a b/ü%20&=+")),
        ("gs://my_bucket.x/p", ("gs", "my_bucket.x", "p")),
        ("az://container/p", ("az", "container", "p")),
        ("file:///var/x", ("file", "", "var/x")),
    ],
)
def test_a_url_is_taken_as_it_is_written(text: str, expected: tuple[str, str, str]) -> None:
    url = address.parse(text)
    assert (url.scheme, url.container, url.prefix) == expected
    assert address.parse(str(url)) == url
    assert address.is_url(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://", "can be no bucket's name"),
        ("s3:///x", "can be no bucket's name"),
        ("s3://b u/x", "can be no bucket's name"),
        ("http://host/x", "no store is opened by http://"),
        ("ftp://host/x", "expected s3://bucket/prefix"),
        ("s3://bucket/a//b", "no empty part"),
        ("s3://bucket/../x", "no empty part, '.' or '..'"),
        ("s3://bucket/a\nb", "a control character"),
        ("s3://bucket/a?versionId=1", "'?' is refused"),
        ("s3://bucket/a#b", "'#' is refused"),
        ("s3://bucket/" + "x" * 513, "longer than 512 bytes"),
        ("file://host/x", "expected file:/// and an absolute path"),
        ("runs/a", "is no URL of a store"),
    ],
)
def test_a_wrong_url_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        address.parse(text)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["s3://KEY:hush@bucket/x", "s3://bucket/x?X-Amz-Signature=hush", "az://c/x?sig=hush"]
)
def test_what_may_be_a_password_is_never_said(text: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        address.parse(text)
    assert "hush" not in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_store_or_a_sentence(text: str) -> None:
    for candidate in (text, f"s3://{text}", f"s3://bucket/{text}", f"file:///{text}"):
        try:
            url = address.parse(candidate)
        except StoreUrlError as error:
            assert str(error).isprintable()
        else:
            assert ".." not in url.prefix.split("/")
            assert address.parse(str(url)) == url


@pytest.mark.parametrize("text", ["runs/a", "/runs/a", "C:\\x", ".", "s3:/bucket"])
def test_a_directory_is_no_url(text: str) -> None:
    assert not address.is_url(text)


def test_plain_http_wants_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    given = {"access_key_id": "a", "secret_access_key": "hush"}
    options = StoreOptions(endpoint="http://127.0.0.1:9", credentials=given)
    with pytest.raises(StoreUrlError, match="plain http"):
        open_store("s3://bucket", options)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUrlError, match="--allow-http"):
        open_store("s3://bucket")
    assert open_store("s3://bucket", StoreOptions(allow_http=True)).name == "s3://bucket"
    assert "hush" not in repr(options)


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("gs://bucket", StoreOptions(region="eu-west-1"), "gs:// takes no region"),
        ("gs://bucket", StoreOptions(endpoint="https://x"), "gs:// takes no endpoint"),
        ("az://container", StoreOptions(region="eu-west-1"), "az:// takes no region"),
        ("s3://bucket", StoreOptions(endpoint="https://u:hush@x"), "without a user"),
        ("s3://bucket", StoreOptions(endpoint="x:9000"), "is no https://host"),
        ("file:///none/there", StoreOptions(), "there is no such directory"),
        ("s3://bucket", StoreOptions(credentials={"hush": "hush"}), "AWS_ACCESS_KEY_ID is missing"),
        (
            "s3://bucket",
            StoreOptions(
                credentials={"access_key_id": "a", "secret_access_key": "b", "hush": "hush"}
            ),
            "with these settings",
        ),
    ],
)
def test_an_option_that_does_not_fit_is_refused(url: str, options: StoreOptions, why: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url, options)
    assert why in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("s3://abc/x", True),
        ("s3://My_Bucket/a/b/", True),
        ("s3://bucket/.x/..y/...", True),
        ("az://con-tainer/x", True),
        ("s3://ab/x", False),
        ("gs://My/x", False),
        ("az://con.tainer/x", False),
        ("s3://bucket/../x", False),
        ("s3://bucket/x/..", False),
        ("s3://bucket/a/./b", False),
        ("s3://bucket/a//b", False),
    ],
)
def test_a_trainingrun_takes_no_url_that_is_refused_here(url: str, is_good: bool) -> None:
    assert (re.search(BUCKET_URL_PATTERN, url) is not None) == is_good
    if is_good:
        address.parse(url)
        return
    with pytest.raises(StoreUrlError):
        address.parse(url)

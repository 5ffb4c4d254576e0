"""Pages: counts, sharing, reuse by content and who is forgotten first, against a brute-force model."""

from __future__ import annotations

import random

import pytest

from powerinfer.runtime.kv_cache import PageCache, page_key


def fill(cache: PageCache, keys: list[bytes]) -> list[int]:
    """Pages of a request that computed pages with these keys and has not ended."""
    pages = cache.reserve(len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        cache.publish(page, key)
    return pages


def test_keys_chain() -> None:
    first = page_key(b"", [1, 2])
    assert first == page_key(b"", (1, 2))
    others = {first, page_key(b"", [2, 1]), page_key(first, [1, 2]), page_key(page_key(b"", [3, 4]), [1, 2])}
    assert len(others) == 4, "a key depends on the tokens, on their order and on everything before them"


def test_pages_run_out_and_come_back() -> None:
    cache = PageCache(3)
    pages = cache.reserve(2)
    assert pages is not None and len(set(pages)) == 2
    assert cache.available == 1
    assert cache.reserve(2) is None and cache.available == 1
    last = cache.allocate()
    assert last is not None and {*pages, last} == {0, 1, 2}
    assert cache.allocate() is None
    cache.release(pages)
    assert cache.available == 2


def test_a_published_page_is_found_until_it_is_needed() -> None:
    cache = PageCache(2)
    (page,) = fill(cache, [b"k"])
    assert cache.find(b"k") == page, "while in use"
    cache.release([page])
    assert cache.find(b"k") == page and cache.available == 2, "and afterwards"
    assert cache.allocate() != page, "an empty page goes first"
    assert cache.find(b"k") == page
    assert cache.allocate() == page
    assert cache.find(b"k") is None


def test_a_shared_page_is_kept_until_its_last_user_leaves() -> None:
    cache = PageCache(1)
    (page,) = fill(cache, [b"k"])
    cache.take(page)
    cache.release([page])
    assert cache.available == 0 and cache.allocate() is None
    cache.release([page])
    assert cache.available == 1


def test_the_longest_unused_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    cache = PageCache(4)
    old = fill(cache, [b"o1", b"o2"])
    new = fill(cache, [b"n1", b"n2"])
    cache.release(old)
    cache.release(new)
    assert cache.find(b"o1") == old[0]
    cache.take(old[0])  # used again: now the youngest
    cache.release([old[0]])
    gone = [cache.allocate() for _ in range(4)]
    assert gone == [old[1], new[1], new[0], old[0]]


def test_the_second_page_of_a_key_is_not_offered() -> None:
    cache = PageCache(3)
    (first,) = fill(cache, [b"k"])
    (second,) = fill(cache, [b"k"])
    assert cache.find(b"k") == first != second
    cache.release([second])
    cache.release([first])
    assert {cache.allocate(), cache.allocate()} == {second, 2}
    assert cache.find(b"k") == first, "the one with content nobody can find is taken first"


def test_without_reuse_nothing_is_found() -> None:
    cache = PageCache(1, reuse=False)
    (page,) = fill(cache, [b"k"])
    cache.release([page])
    assert cache.find(b"k") is None and cache.available == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_use_against_a_plain_model(seed: int) -> None:
    """Requests come, share, grow and go. The model: a list of users of each page, and content by key."""
    rng = random.Random(seed)
    n_pages = rng.randint(1, 12)
    cache = PageCache(n_pages)
    users: dict[int, int] = dict.fromkeys(range(n_pages), 0)
    content: dict[int, bytes] = {}
    running: list[list[int]] = []
    for step in range(400):
        action = rng.random()
        if action < 0.5:
            page = cache.allocate()
            if page is None:
                assert all(users.values())
            else:
                assert users[page] == 0, "a page in use is never given away"
                assert page not in content or not any(users[other] == 0 and other not in content for other in users), (
                    "content is kept while an empty page is left"
                )
                content.pop(page, None)
                users[page] = 1
                running.append([page])
                if rng.random() < 0.7:
                    key = b"%d" % rng.randint(0, step)
                    if cache.find(key) is None:
                        content[page] = key
                    cache.publish(page, key)
        elif action < 0.75 and content:
            page = rng.choice(sorted(content))
            assert cache.find(content[page]) == page
            cache.take(page)
            users[page] += 1
            running.append([page])
        elif running:
            gone = running.pop(rng.randrange(len(running)))
            for page in gone:
                users[page] -= 1
            cache.release(gone)
        assert cache.available == sum(count == 0 for count in users.values())

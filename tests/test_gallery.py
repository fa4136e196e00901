"""What a build does with recordings, lessons and mistakes, on a small site of its own."""

import pytest
import sphinx_gallery
from bs4 import BeautifulSoup
from mini_site import ROOT, TINY, MiniSite, run

FAILS = TINY.replace("Tiny\n====", "Fails\n=====").replace(
    'print("hello from', 'raise RuntimeError("broken on purpose")\nprint("hello from'
)


@pytest.fixture
def site(tmp_path):
    return MiniSite(tmp_path / "site")


@pytest.fixture
def recorded(site):
    """A site whose lesson was recorded on a machine with a GPU, and whose own runs are gone."""
    result = site.record()
    assert result.returncode == 0, result.output
    run(["rm", "-r", "_build"], site.home)
    return site


def build(site, **options):
    result = site.sphinx(**options)
    assert result.returncode == 0, result.output
    return result.output


def test_the_seam():
    """`execute_script` is wrapped by our code, so Sphinx-Gallery's version is pinned exactly."""
    requirements = (ROOT / "docs/requirements.txt").read_text().splitlines()
    assert f"sphinx-gallery=={sphinx_gallery.__version__}" in requirements


def test_replay_shows_the_recording(recorded):
    output = build(recorded, torch=False)
    page = recorded.page()
    assert output == ""
    assert recorded.times_run() == 1  # when it was recorded
    assert "Recorded on Test GPU" in page
    assert "hello from the tiny lesson" in page
    assert '<span class="measured">1.50×</span>' in page
    assert page.count('alt="A line with one peak."') == 2
    assert "Figure. A line" not in page


def test_both_languages_run_a_script_once(site):
    build(site, fake_gpu="Test GPU")
    build(site, fake_gpu="Test GPU", language="zh_CN")
    assert site.times_run() == 1
    assert "Executed on Test GPU" in site.page()
    assert "hello from the tiny lesson" in site.page(language="zh")


def test_a_gpu_runs_its_own_code_not_the_recording(recorded):
    build(recorded, fake_gpu="Test GPU")
    assert recorded.times_run() == 2
    assert "Executed on Test GPU" in recorded.page()


@pytest.mark.parametrize(
    "old, new",
    [
        ("A first paragraph.", "Another first paragraph."),
        ("# Figure. A line with one peak.", "# Figure. A line that rises and falls."),
        ('print("hello', '# A comment.\nprint("hello'),
    ],
)
def test_prose_does_not_void_a_recording(recorded, old, new):
    recorded.edit(old, new)
    build(recorded, torch=False)
    assert "Recorded on Test GPU" in recorded.page()


def test_a_helper_file_that_the_code_names_is_part_of_it(site):
    site.write("examples/tools/helper.py", '"""Its purpose."""\n\nVALUE = 1\n')
    site.edit('print("hello', 'print(Path("../tools/helper.py").exists())\nprint("hello')
    site.record()
    site.edit("Its purpose", "Another text", "examples/tools/helper.py")
    build(site, torch=False)
    assert "Recorded on Test GPU" in site.page()
    downloads = site.home / "_build" / "html" / "en" / "downloads"
    assert (downloads / "helper.py").read_text() == '"""Another text."""\n\nVALUE = 1\n'
    assert 'href="../../downloads/helper.py"' in site.page()
    site.edit("VALUE = 1", "VALUE = 2", "examples/tools/helper.py")
    assert "the code has changed since" in build(site, torch=False)
    assert "Not executed" in site.page()


def test_stale_without_torch_is_marked(recorded):
    recorded.edit("hello from", "greetings from")
    output = build(recorded, torch=False)
    assert "the code has changed since" in output
    assert "Not executed" in recorded.page()
    assert "greetings from" not in recorded.page().split("Not executed")[1].split("<pre>")[0]
    assert '<span class="measured">—</span>' in recorded.page()


def test_stale_with_torch_runs_in_the_interpreter(recorded):
    recorded.edit("hello from", "greetings from")
    output = build(recorded)
    assert "the code has changed since" in output and "measured" in output
    assert "Not GPU output" in recorded.page()
    assert "greetings from the tiny lesson" in recorded.page()
    build(recorded)
    assert recorded.times_run() == 2  # not again for the second build


def test_no_recording(site):
    output = build(site, torch=False)
    assert "there is no recording" in output
    assert "Not executed" in site.page()


def test_a_new_recording_replaces_the_mark(site):
    build(site, torch=False)
    site.record()
    build(site, torch=False)
    assert "Recorded on Test GPU" in site.page()


@pytest.mark.parametrize(
    "name, message",
    [
        ("outputs.json", "outputs.json is not the file that was recorded"),
        ("manifest.json", "manifest.json cannot be read"),
        ("figure-1.svg", "figure-1.svg is not the file that was recorded"),
    ],
)
def test_a_recording_cut_off(recorded, name, message):
    path = recorded.recording() / name
    path.write_bytes(path.read_bytes()[:-30])
    assert message in build(recorded, torch=False)
    assert "Not executed" in recorded.page()
    assert message in BeautifulSoup(recorded.page(), "html.parser").get_text()


def test_a_missing_figure(recorded):
    (recorded.recording() / "figure-1.svg").unlink()
    assert "figure-1.svg is missing" in build(recorded, torch=False)


def test_record_shows_progress_and_skips_what_is_fresh(recorded):
    recorded.lesson(TINY.replace("Tiny\n====", "Second\n======"), "1_part/02_second.py")
    output = recorded.record().output
    assert "[1/1] second on Test GPU" in output and "recorded in" in output
    assert "tiny on" not in output
    output = recorded.record(FORCE="1").output
    assert "[1/2] tiny" in output and "[2/2] second" in output
    assert "[1/1] tiny" in recorded.record("tiny", FORCE="1").output


def test_a_warning_of_a_package_does_not_say_where_python_lies(site):
    site.edit(
        'print("hello', 'print("/opt/py-3/lib/site-packages/torch/x.py:7: slow")\nprint("hello'
    )
    assert site.record().returncode == 0
    outputs = (site.recording() / "outputs.json").read_text("utf-8")
    assert "    torch/x.py:7: slow" in outputs and "/opt" not in outputs


def test_a_lesson_that_raises_keeps_its_old_recording(recorded):
    before = (recorded.recording() / "manifest.json").read_text()
    recorded.edit('print("hello', 'raise RuntimeError("broken on purpose")\nprint("hello')
    result = recorded.record()
    assert result.returncode != 0
    assert "broken on purpose" in result.output
    assert "tiny raised; its old recording is kept" in result.output
    assert (recorded.recording() / "manifest.json").read_text() == before


def test_lessons_can_be_recorded_one_by_one(site):
    site.lesson(TINY, "1_part/02_other.py")
    for stem in ("tiny", "other"):
        result = site.record(stem)
        assert result.returncode == 0 and f"[1/1] {stem} recorded" in result.output, result.output


def test_one_that_raises_does_not_stop_the_others(site):
    site.lesson(FAILS, "1_part/00_fails.py")
    result = site.record()
    assert result.returncode != 0
    assert "00_fails.py" in result.output and "tiny recorded" in result.output


def test_a_build_names_the_lesson_that_raises(site):
    site.lesson(FAILS, "1_part/02_fails.py")
    result = site.sphinx(fake_gpu="Test GPU")
    assert result.returncode != 0
    assert "02_fails.py" in result.output and "broken on purpose" in result.output


def stops(site, message, **options):
    result = site.sphinx(**options)
    assert result.returncode != 0
    assert message in " ".join(result.output.split()), result.output


def test_two_lessons_of_one_stem(site):
    site.lesson(TINY, "1_part/02_tiny.py")
    stops(site, "two lessons have the stem 'tiny': 1_part/01_tiny.py and 1_part/02_tiny.py")


def test_a_figure_without_caption(site):
    site.edit("# Figure. A line", "# A line")
    stops(site, "a figure has no caption")


def test_a_caption_without_figure(recorded):
    recorded.edit("plt.plot([1, 3, 2])\nplt.show()", "print(plt)")
    stops(recorded, "a caption follows no figure", fake_gpu="Test GPU")


def test_two_figures_in_a_cell(site):
    site.edit("plt.show()", "plt.figure()\nplt.show()")
    result = site.sphinx()
    assert "a cell draws at most one figure" in result.output and result.returncode != 0


def test_a_figure_too_large(site):
    site.edit("plt.plot([1, 3, 2])", "plt.scatter(range(9000), range(9000))")
    result = site.sphinx()
    assert "draw its dense part with rasterized=True" in result.output and result.returncode != 0


def test_bad_results_are_not_recorded(site):
    site.edit('"value": 90.0', '"value": float("inf")')
    stops(site, "value is not a finite number", fake_gpu="Test GPU")
    assert not site.recording().exists()


@pytest.mark.parametrize(
    "query, message",
    [
        ("tiny triton/torch metric=GB/s N=17", "no row matches"),
        ("tiny triton metric=GB/s N=17", "no rows match"),
        ("tiny triton", "name one metric"),
        ("tinny triton metric=GB/s", "there is no lesson 'tinny'"),
    ],
)
def test_a_query_without_answer_stops_the_build(recorded, query, message):
    recorded.edit("tiny triton/torch metric=GB/s N=16", query)
    stops(recorded, message, torch=False)


def test_another_gpu_may_lack_a_case(recorded):
    recorded.edit("tiny triton/torch metric=GB/s N=16", "tiny triton metric=GB/s N=17")
    assert "this GPU's run" in build(recorded, fake_gpu="Small GPU")
    assert '<span class="measured">—</span>' in recorded.page()


def test_pages_show_recorded_parts(recorded):
    index = "# Home\n\n```{toctree}\nlessons/index\n```\n\n"
    index += "```{recorded-card} tiny\n```\n\n```{recorded-excerpt} tiny note\n```\n\n"
    index += "```{recorded-table} tiny metric=GB/s\n```\n\n"
    index += "```{recorded-figure} tiny 1\nA caption with `code`.\n```\n\n"
    index += "{lesson}`tiny` is {measured}`tiny triton metric=GB/s N=16`.\n\n"
    index += "```{lesson-cards} 1_part\n```\n\n```{recordings}\n```\n"
    recorded.write("docs/index.md", index)
    assert build(recorded, torch=False) == ""
    page = recorded.page("index")
    for text in ["Recorded on Test GPU", "a text", "<p>triton</p>", "90.0\xa0GB/s", "valid"]:
        assert text in page
    assert page.count('alt="A caption with code."') == 2
    assert 'href="lessons/1_part/01_tiny.html"' in page and ">Tiny</a>" in page
    assert "A first paragraph." in page


def test_what_a_killed_recording_left_is_not_taken_for_a_lesson(recorded):
    for rest in ("tiny.new", "tiny.old", "gone"):
        (recorded.recording().with_name(rest)).mkdir()
    recorded.write(
        "docs/index.md", "# Home\n\n```{toctree}\nlessons/index\n```\n\n```{recordings}\n```\n"
    )
    assert build(recorded, torch=False) == ""
    page = recorded.page("index")
    assert page.count("Test GPU") == 1 and ">valid<" in page


@pytest.mark.parametrize("directive", ["recorded-figure} tiny 2", "recorded-excerpt} tiny other"])
def test_a_part_that_was_not_recorded_stops_the_build(recorded, directive):
    recorded.write("docs/index.md", f"# Home\n\n```{{{directive}\n```\n")
    stops(recorded, "tiny has no", torch=False)


def test_maths_that_cannot_be_shown_is_named(recorded):
    recorded.write("docs/index.md", "# Home\n\n$\\nosuch$\n")
    output = build(recorded, torch=False)
    assert "maths cannot be shown" in output and "index.md:3" in output

"""Wrong input on the command line: one sentence, the right exit code, no traceback, nothing left behind."""

import pytest

from attnreg.experiments.compare import make as launch
from tests.helpers.commands import assert_sentence
from tests.helpers.repository import ROOT

PROBE = ROOT / "docs/results/attribution/probe.py"


def bad(*args, code=1, says=""):
    return pytest.param(args, code, says, id=" ".join(map(str, args))[:60] or "nothing")


BAD = [
    bad("recipe", "attendin", code=2, says="Expected a recipe among ad-drop, attendout, .* `attnreg list recipes`. Did you mean attendout\\?$"),
    bad("recipe", "nothing.py", code=2, says="Recipe file nothing.py not found"),
    bad("list", "datasets", code=2, says="'datasets' is not one of 'recipes', 'studies', 'tasks', 'providers'"),
    bad("copy", "attendin", "x.py", code=2, says="Expected a recipe among"),
    bad("copy", "finetune", "x.txt", code=2, says="Expected FILE to end in .py"),
    bad("recipe", "finetune", "--task", "hans", code=2, says="Task 'hans' is for evaluation only. .* `attnreg evaluate RUN --task hans`"),
    bad("recipe", "finetune", "--task", "custom", "--text-columns", "a", code=2, says="--task custom needs --data-dir"),
    bad("recipe", "finetune", "--task", "custom", code=2, says="--task custom needs --text-columns"),
    bad("recipe", "finetune", "--task", "ptb-pos", says="Task 'ptb-pos' is not on the hub: use --data-dir"),
    bad("recipe", "finetune", "--stratified", "--shots", 4, code=2, says="--stratified needs --train-size"),
    bad("recipe", "finetune", "--stratified", code=2, says="--stratified needs --train-size"),
    bad("recipe", "finetune", "--nonsense", code=2, says="No such option"),
    *(
        bad("recipe", "finetune", typed, 1, code=2, says=f"No such option '{typed}'\\. Did you mean {meant}\\?$")
        for typed, meant in {
            "--lr": "--learning-rate",
            "--per_device_train_batch_size": "--batch-size",
            "--num_train_epochs": "--epochs",
            "--model_name_or_path": "--model",
            "--max-seq-length": "--max-length",
        }.items()
    ),
    bad("plot", "run", "--layr", 1, code=2, says="No such option '--layr'\\. Did you mean --layer\\?$"),
    bad("compare", "finetune", "--seed", 1, code=2, says="No such option '--seed'\\. Did you mean --seeds\\?$"),
    bad("compare", "finetune", "ad-drop", "--q", 0.3, code=2, says="No such option '--q'\\. Put a method's options in quotes with the method, as in 'ad-drop --q ...'\\.$"),
    bad("compare", "ad-drop", "finetune", "--q=0.3", "--seeds", 2, code=2, says="in quotes with the method, as in 'ad-drop --q ...'\\.$"),
    bad("recipe", "ad-drop", "--q", 2, code=2, says="2.0 is not in the range 0<=x<=1"),
    bad("recipe", "ad-drop", "--steps", 0, code=2, says="0 is not in the range x>=1"),
    bad("recipe", "finetune", "--seed", -1, code=2, says="--seed.*-1 is not in the range"),
    bad("recipe", "ad-drop", "--layers", "0,x", code=2, says="expected 'all' or layer indices such as 0,1,-1, got '0,x'"),
    bad("recipe", "ad-drop", "--layers", 3, says="Expected layers among .0, 1, 2. in AttributionProvider, got .3."),
    bad("recipe", "ad-drop", "--every", 2, "--offset", 2, says="Expected `offset` to be below `every`, 2, got 2"),
    bad("recipe", "finetune", "--model", ".", says=r"the folder of a model, got \., without config\.json"),
    bad("recipe", "finetune", "--model", "nobody/nothing", says="No model nobody/nothing: .* not in the local cache, and the hub does not answer"),
    bad("recipe", "finetune", "--task", "cola", says="Cannot load .* for task 'cola' from the hub or the local cache: use --data-dir"),
    bad("recipe", "finetune", "--max-length", 65, says="Expected --max-length of at most 64"),
    bad("recipe", "finetune", "--resume", says="No run to resume in .*\\. Start it without --resume"),
    bad("ad-drop", "--epochs", 1, code=2, says="No such command 'ad-drop'. To run the recipe: attnreg recipe ad-drop$"),
    bad("copy", "finetune", "no/x.py", says="There is no folder no for x.py: make it.$"),
    bad("copy", "finetune", "/proc/x.py", says="Cannot read or write a file: .*/proc/.*x.py"),
    bad("recipe", "finetune", "--epochs", 10**26, code=2, says="--epochs.*is not in the range 1<=x<=100000"),
    *(bad(*command, "--threads", 10**5, code=2, says="100000 is not in the range 1<=x<=1024") for command in (["recipe", "finetune"], ["fit", "x.csv"], ["compare"], ["search"])),
    bad("recipe", "finetune", "--learning-rate", "nan", code=2, says="Expected a finite number for --learning-rate, got nan"),
    bad("recipe", "finetune", "--batch-size", 10**26, code=2, says="Expected at most 2147483647 for --batch-size"),
    bad("recipe", "attendout", "--round-steps", 10**20, code=2, says="Expected at most 2147483647 for --round-steps"),
    bad("recipe", "finetune", "--validation-rows", 2000, says="Holding out 2000 rows needs at least 2001 training rows, got 2000"),
    bad("recipe", "finetune", "--validation-rows", 1900, "--train-size", 200, says="Expected --train-size of at most 100, because 1900 of 2000 rows are held out"),
    bad("recipe", "finetune", "--mixed-precision", "fp16", "--device", "cpu", says="Precision fp16 is not available here: "),
    bad("recipe", "finetune", "--output-dir", "/proc/x", says="Cannot write to --output-dir"),
    bad("recipe", "finetune", "--output-dir", "h\udce4", says=r"Expected --output-dir to be a name in UTF-8, got 'h\\udce4'"),
    bad("recipe", "finetune", "--data-dir", "/dev/null", says="got /dev/null: it is neither; save its content as a file"),
    bad("recipe", "finetune", "--data-dir", "", code=2, says="got an empty text: is a variable of the shell not set"),
    bad("recipe", "finetune", "--model", "a/b/c", says="No model a/b/c: there is no such folder, and it is no name on the hub"),
    bad("recipe", "attendout", "--warmup", 0.7, code=2, says="--warmup must be below --game, got 0.7 and 0.6"),
    bad("recipe", "attendout", "--generator", "GNetProvider(num_heads='x')", says="Expected `num_heads` to be a whole number or 'heads', got 'x'"),
    bad("recipe", "attendout", "--generator", "none", "--credit", "Reinforce()", says="`credit` has no effect without a Generator"),
    bad("recipe", "attendout", "--generator", "none", "--provider", "DropHead(0.1)", code=2, says="--generator none and --provider exclude each other"),
    bad("recipe", "attendout", "--provider", "LearnableBernoulli(0.1)", says="LearnableBernoulli makes training passes without"),
    bad("recipe", "attendout", "--generator", "none", "--initial-keep", 0.8, code=2, says="--initial-keep and --generator both set the rates at which the Generator begins: remove one"),
    bad("recipe", "attendout", "--regime", "paper", "--initial-keep", 0.8, code=2, says="--initial-keep and --generator both set the rates at which the Generator begins: remove one"),
    bad("recipe", "attendout", "--rewards", "Rewards(batches_per_round=1, fresh_rows=2)", says="`fresh_rows` are all scored in their round"),
    bad("recipe", "attendout", "--rewards", "Rewards(fresh_rows=2)", "--reward-data", "train", code=2, says="`fresh_rows` in --rewards needs rows besides"),
    bad("recipe", "attendout", "--rewards", "Rewards(fresh_rows=1000)", code=2, says="Expected `fresh_rows` in --rewards of at most 200"),
    bad("recipe", "attendout", "--rewards", "Rewards(fresh_rows='all')", says="Expected `fresh_rows` to be"),
    bad("recipe", "attendout", "--credit", "Reinforce(per='step')", "--reward-data", "train", says="Expected `batches` of `rewards` with `per`"),
    bad("recipe", "attendout", "--credit", "Reinforce(price=0.1)", says="got an unexpected keyword argument 'price'"),
    bad("recipe", "attendout", "--credit", "gradient", says="Expected Reinforce.* got 'gradient'"),
    bad("recipe", "attendout", "--generator", "DropHead(0.1)", says="Expected one Generator, such as a GNetProvider, alone or in a compos"),
    bad("recipe", "attendout", "--train-size", 96, "--epochs", 3, "--warmup", 0.39, "--game", 0.4, code=2, says="No step is left for the game: raise --game or --epochs, or lower --warmup"),
    bad("recipe", "finetune", "--stop-on", "dev", code=2, says="--stop-on needs --patience or --select best"),
    bad("recipe", "finetune", "--stopping-rows", 5, code=2, says="--stopping-rows needs --patience"),
    bad("recipe", "finetune", "--patience", 1, "--stop-on", "dev", "--stopping-rows", 5, code=2, says="--stop-on dev and --stopping-rows exclude each other, because no rows are held out"),
    bad("recipe", "finetune", "--patience", 1, "--stopping-rows", 2000, says="Holding out 2000 rows needs at least 2001 training rows, got 2000"),
    bad("recipe", "attendout", "--train-size", 1, says="Holding out 1 row needs at least 2 training rows, got 1"),
    bad("compare", code=2, says="Expected METHODs to compare, or --study FILE"),
    bad("recipe", "finetune", "--metric", "acuracy", code=2, says="Expected --metric .*, got 'acuracy'. Did you mean accuracy\\?$"),
    bad("recipe", "regularize", "--provider", "DropHead", says="got DropHead without brackets: write DropHead\\(\\)\\.$"),
    bad("recipe", "regularize", "--provider", "DropHead(pp=0.1)", code=1, says="Expected the arguments of DropHead.*'pp'. Did you mean p\\?$"),
    bad("recipe", "regularize", "--provider", "Scheduled(TokenDropout(0.1), pp=[(0, 0.3), (1, 0)])", says="Expected an argument of TokenDropout that a schedule can change .*, got 'pp'. Did you mean p\\?$"),
    bad("recipe", "finetune", "--learning-rate", "low", code=2, says="'low' is not a number\\.$"),
    bad("recipe", "ad-drop", "--epochs", 1, code=2, says="With --epochs 1, AD-DROP would never act: .* Use --epochs 2 or more"),
    bad("compare", "finetune", "--model", "./nowhere", says="No model ./nowhere"),
    bad("compare", "", code=2, says="Expected a recipe with its options, got an empty text"),
    bad("compare", "finetune 'x", code=2, says="No closing quotation"),
    bad("compare", "finetune", "--baseline", "ad-drop", code=2, says="Expected --baseline to be one of the methods"),
    bad("compare", "finetune", "finetune", code=2, says="Expected every method once"),
    bad("compare", "a=finetune", "a=ad-drop", code=2, says="Expected every method once, got 'a=finetune' and 'a=ad-drop'"),
    bad("compare", "A|b=finetune", code=2, says="Expected words of letters and digits, with dashes between, as a name, got 'A|b'"),
    bad("compare", "a--b=ad-drop --p 0.3", code=2, says="Expected words of letters .*, got 'a--b'"),
    bad("compare", "finetune", "finetune=ad-drop", code=2, says="Expected every method once, got 'finetune' and 'finetune=ad-drop'"),
    bad("compare", "finetune", "search=ad-drop", code=2, says="A comparison has a folder search: choose another name than in 'search=ad-drop'"),
    bad("compare", "finetune", "--first-seed", 2**31 - 1, "--seeds", 2, code=2, says="Expected seeds of at most 2147483647, got 2147483647 to 2147483648"),
    *(
        bad("compare", f"ad-drop --q {{{values}}}", code=2,
            says=f"Expected different values in braces, none of them empty, got {{{values}}} in 'ad-drop")
        for values in ("0.1,", "0.1,0.1", "")
    ),
    bad("compare", "ad-drop --q {0.1,0.2}", "--search-rows", 9999, says="Holding out 9999 rows needs at least 10000 training rows, got 2000"),
    bad("compare", "finetune", "ad-drop --q {0.1,x}", code=2, says="Error: In 'ad-drop --q x': Invalid value for '--q'"),
    bad("compare", "finetune", "ad-drop --validation-rows=3", code=2, says="--validation-rows must be the same for all methods"),
    bad("compare", "finetune", "ad-drop --task cola", code=2, says="--task must be the same for all methods"),
    bad("compare", "finetune", "--task", "nothing", code=2, says="Expected a task among"),
    bad("compare", "finetune --seed 3", code=2, says="--seed must be the same for all methods"),
    bad("compare", "finetune", "--validation-rows", 9, code=2, says="No such option '--validation-rows'. To score on rows of train, use --folds N, or `validation_rows: N` for a task of"),
    bad("search", "--space", "options: {learning-rate: 1e-5..1e-3}", "--data-dir", "nowhere", says="got nowhere: no such folder or file"),
    bad("compare", "finetune", "--jobs", 2, "--launcher", "commands", code=2, says="--jobs and --launcher exclude each other, because only"),
    bad("search", "--runs", 2, "--seeds", 3, code=2, says=r"Expected --runs of at least --seeds \(3\), got 2"),
    bad("search", "--space", "options: {lr-warmup: [no, 0.3]}", says="Expected --lr-warmup in the search space as a number"),
    *(
        bad("search", "--space", space, code=2 if "options:" in space else 1, says=says)
        for space, says in {
            "nothing.yaml": "Cannot read the search space",
            "{}": "The search space is empty: give `options`, `providers`, or both.",
            "DropHead": "Expected the search space to map names to values, got 'DropHead'",
            "provider: {}": "Unknown key 'provider' in the search space. Did you mean providers",
            "providers: [DropHead]": "Expected `providers` of the search space to map names to values",
            "providers: {DropHeads: {}}": "No provider is named 'DropHeads'.* Did you mean DropHead",
            "providers: {DropHead(0.1): {}}": "Expected a provider's name in the search space, .*, got 'DropHead\\(0.1\\)'",
            "providers: {DropHead: {rate: 0.1..0.5}}": "Expected the arguments of DropHead",
            "providers: {DropHead: {p: 0.1..1.5}}": "Expected `p` to be a probability .*, got 1.5",
            "providers: {DropHead: {p: 0.5..0.1}}": "DropHead p in the search space as a range from low",
            "providers: {DropHead: {p: 0.1..0.5 lin}}": "DropHead p in the search space as a range",
            "providers: {DropHead: {p: []}}": "DropHead p in the search space as a range",
            **{
                f"providers: {{DropHead: {{p: {dots}}}}}": "DropHead p in the search space as a range"
                for dots in ("1e-3...1e-1", "0.1 .. 0.5", "'0.1..'", "[0.1..0.5, 0.9]")
            },
            "providers: {DropHead: {layers: middle}}": "Expected `layers` .* got 'middle'",
            "{providers: {DropHead: {}}, most: 0}": "Expected `most` in the search space",
            "options: {learning-rate: -1..1}": "Invalid value for '--learning-rate'",
            "options: {q: 0.1..0.5}": "No such option",
            "options: {train-size: 10..50}": "--train-size cannot be in the search space",
            "{recipe: nothing, options: {epochs: 1..2}}": "Expected a recipe among",
        }.items()
    ),
    bad("plot", "nowhere", says="Run folder nowhere not found"),
    *(bad("recipe", PROBE, "--q", text, code=2, says="expected probabilities such as 0,0.5,1, got") for text in ("x", "0,2", "-1", "nan")),
    bad("recipe", "ad-drop", "--layers", "0,3", says=r"Expected layers among .0, 1, 2. in AttributionProvider, got .3.:"),
    bad("recipe", "finetune", "--reinit-layers", 4, says="BertForSequenceClassification has 3 blocks, too few to re-initialize 4"),
    bad("recipe", "pretrain", "--task", "agreement-words", "--shots", 1, code=2, says="--shots is for classification, but agreement-words is a masked-lm task"),
    bad("compare", "--study", "attendout-table9", code=2, says="Did you mean attendout-table"),
    bad("compare", "finetune", "best=@nowhere", says="Expected the folder of a search after @, got nowhere"),
    bad("compare", "finetune", "@nowhere", code=2, says="Give the winner of a search a name, as in best=@now"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "code", "says"), BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(cli, tmp_path, monkeypatch, args, code, says):
    monkeypatch.setattr(launch, "local", lambda *args: pytest.fail("runs would be started"))
    assert_sentence(cli(*args), code, says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("args", "what"), [(("compare", "finetune"), "comparison"), (("search",), "search")])
def test_an_output_folder_that_holds_something_else_is_left_alone(cli, tmp_path, args, what):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert_sentence(cli(*args, "--output-dir", "full"), 1, f"--output-dir full holds files but no {what}")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "thesis.tex"]

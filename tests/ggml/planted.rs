//! An engine that differs from every family is refused in one line, and lives.
//!
//! Each difference is planted in a real engine: a library stands before its base library and does one
//! thing otherwise (`planted_base.c`).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::common::require::llama_directory;
use crate::common::{Mode, Mount};
use crate::program::{Link, library, run};

/// What is planted, and what is said of it.
const DIFFERENCES: [(&str, &str); 16] = [
    (
        "clear moved",
        "ggml_backend_buffer_clear finds clear of a buffer at word 10, ggml 0.15 to 0.25 has it at word 9",
    ),
    ("set_tensor moved", "ggml_backend_tensor_set finds set_tensor of a buffer at word 5"),
    ("alignment moved", "finds get_alignment of a buffer type at word 3"),
    ("supports_op moved", "finds supports_op of a device at word 10"),
    ("graph_compute moved", "finds graph_compute of a backend at word 14"),
    ("buffer field added", "a buffer has no type where ggml 0.15 to 0.25 has it"),
    ("backend field added", "finds device of a backend at word 18"),
    ("tensor field added", "a tensor has no type or shape where it was"),
    ("properties longer", "ggml_backend_dev_props has another size"),
    ("q4_0 of another size", "a block of q4_0 has another size"),
    ("SET_ROWS", "the engine has no operation SET_ROWS"),
    ("FLASH_ATTN_EXT", "the engine has no operation FLASH_ATTN_EXT"),
    ("CUSTOM", "the engine has no operation CUSTOM"),
    ("crash", "a trial of it ended by SIGSEGV"),
    ("abort", "a trial of it ended by SIGABRT"),
    ("hang", ""),
];

/// An engine that can be planted in.
struct Planted {
    directory: tempfile::TempDir,
    mount: Mount,
}

impl Planted {
    fn new() -> Self {
        let this = Self { directory: scratch_directory(), mount: Mount::new(Mode::Served) };
        let source =
            |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ggml").join(name);
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-Wall", "-Werror"]).arg(source("planted.c"));
        run(cc.arg("-o").arg(this.program()).args(["-ldl", "-lpthread"]));
        let lib = llama_directory().join("lib");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-shared", "-fPIC", "-Wl,--no-as-needed"]);
        cc.arg(source("planted_base.c")).arg("-o").arg(this.base()).arg("-L").arg(&lib);
        run(cc.args(["-l:libggml-base.so", "-ldl"]).arg(format!("-Wl,-rpath,{}", lib.display())));
        this
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("planted")
    }

    /// Has the name by which the backend finds the engine.
    fn base(&self) -> PathBuf {
        self.directory.path().join("libggml-base.planted.so")
    }

    /// Whether the engine was let in, how many microseconds that took, and what was said.
    fn load(&self, variables: &[(&str, &str)]) -> (bool, u64, String) {
        let mut command = Command::new(self.program());
        command.arg(self.base()).arg(llama_directory().join("lib/libggml-cpu-x64.so"));
        command.arg(library(Link::Shared)).env("KVFS_KV", self.mount.path());
        command.env("LD_LIBRARY_PATH", llama_directory().join("lib"));
        command.env_remove("KVFS_GGML").envs(variables.iter().copied());
        let output = run(&mut command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let figure = |name| -> u64 {
            let mut values = text.lines().filter_map(|line| line.strip_prefix(name));
            values.next().unwrap().trim().parse().unwrap()
        };
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (figure("in") == 1, figure("us"), errors)
    }
}

/// Nothing of this is a known version: whoever comes by proof must be what he says.
#[test]
fn differences_are_refused() {
    require!(fuse, llama, cc);
    let planted = Planted::new();
    for (what, line) in DIFFERENCES {
        for version in ["0.25.1", "0.26.0"] {
            let (is_in, _, text) = planted.load(&[("PLANTED", what), ("PLANTED_VERSION", version)]);
            let is_alone = text.lines().count() == 1 && text.starts_with("kvfs: ");
            assert!(is_alone && text.contains(line), "{what}: {text}");
            // Who cannot be tried in time is what his name says.
            assert_eq!(is_in, what == "hang" && version == "0.25.1", "{what}: {text}");
        }
    }
}

#[test]
fn unknown_versions_are_let_in_by_proof() {
    require!(fuse, llama, cc);
    let planted = Planted::new();
    for version in ["0.9.8", "0.26.0"] {
        let (is_in, _, text) = planted.load(&[("PLANTED_VERSION", version)]);
        let line =
            format!("kvfs: ggml {version}, which this kvfs does not know, but all that it uses");
        assert!(is_in && text.starts_with(&line), "{text}");
        assert!(text.contains("as in ggml 0.15 to 0.25") && text.lines().count() == 1, "{text}");
        let strict = [("PLANTED_VERSION", version), ("KVFS_GGML", "strict")];
        let (is_in, _, text) = planted.load(&strict);
        assert!(!is_in && text.contains("KVFS_GGML=strict lets no other in"), "{text}");
    }
    let (is_in, _, text) = planted.load(&[("KVFS_GGML", "strict")]);
    assert!(is_in && text.starts_with("kvfs: ggml 0.25.1; KV caches go to "), "{text}");
}

/// What starting the engine costs more, the median of some starts.
#[test]
fn a_trial_takes_little_time() {
    const MICROSECONDS_MAX: u64 = 50_000;
    require!(fuse, llama, cc);
    let planted = Planted::new();
    let mut times: Vec<u64> = (0..9).map(|_| planted.load(&[]).1).collect();
    times.sort_unstable();
    eprintln!("{times:?} us");
    assert!(times[4] <= MICROSECONDS_MAX, "{times:?}");
}

/// Engines that load backends late have threads by then (Node, Python, Ollama): a child has none of
/// them, whatever they were doing.
#[test]
fn an_engine_with_threads() {
    require!(fuse, llama, cc);
    let planted = Planted::new();
    for _ in 0..20 {
        let (is_in, _, text) = planted.load(&[("PLANTED_THREADS", "3")]);
        assert!(is_in && text.starts_with("kvfs: ggml 0.25.1; KV caches go to "), "{text}");
    }
}

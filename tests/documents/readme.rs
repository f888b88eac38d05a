//! The block "Use it" of README, line by line, on a mount: whoever copies a line must find that it works. Each runs
//! with values for its names in capitals, and with a small figure for a large one, or is told here why it does not.

use std::path::Path;
use std::process::Command;

use super::{PLACE, Step, Unmounting, forks, run, scratch_directory};

/// What lines say, and what stands there when they run: files that [`PREPARATION`] has made, and what a small machine has.
const VALUES: [(&str, &str); 21] = [
    ("qwen3-8b.gguf", "tests/fixtures/tiny-llama/config.json"),
    ("/mnt/nas/kv", "PLACE/remote"),
    ("--ram 4G", "--ram 64M"),
    ("--ram 16G", "--ram 128M"),
    ("ram=8G", "ram=80M"),
    ("[--dry-run|--yes]", "--dry-run"),
    ("[MOUNTPOINT]", "MOUNTPOINT"),
    ("[PATH] [--follow]", "MOUNTPOINT"),
    ("STORE [--repair]", "STORE --repair"),
    ("SEQUENCE|MODEL", "SEQUENCE"),
    ("model bump MODEL REVISION", "model bump MOUNTPOINT/models/qwen 2 --yes"),
    ("import FILE SEQUENCE", "import PLACE/cache.safetensors MODEL/sequences/copy"),
    ("inspect PATH", "inspect SEQUENCE/000/0000000.safetensors"),
    ("diff A B", "diff SEQUENCE SEQUENCE"),
    ("PATH...", "SEQUENCE"),
    ("--tokens FILE", "--tokens SEQUENCE/tokens"),
    ("--plan PATH", "--plan SEQUENCE"),
    ("DIRECTORY", "MOUNTPOINT/files"),
    ("SEQUENCE", "MODEL/sequences/chat"),
    ("MODEL", "MOUNTPOINT/models/demo"),
    ("STORE", "PLACE/store"),
];
/// Lines that do not run here, by how they begin.
const NOT_RUN: [(&str, &str); 4] = [
    ("kvfs demo", "tests/demo_command.rs runs it"),
    ("kvfs slots save ", "needs a server of llama.cpp: tests/engines"),
    ("kvfs upgrade ", "refused with a RAM tier: tests/takeover"),
    ("kvfs bench ", "measures for minutes: tests/command_line.rs"),
];
/// Made once the model is there: a conversation of 2048 tokens, and a file of it.
const PREPARATION: &str = "\
kvfs create MOUNTPOINT/models/demo --layers 1 --kv-heads 1 --head-dim 64 --page-tokens 1024
mkdir -p SEQUENCE/000
for tail in 0000000 0001024; do head -c 262144 /dev/zero > SEQUENCE/000/$tail.tail; done
head -c 8192 /dev/zero > SEQUENCE/tokens
kvfs export SEQUENCE PLACE/cache.safetensors
cat SEQUENCE/000/0000000.safetensors > PLACE/page";

/// Commands of the block, without comments and the lines that are comments alone.
fn commands() -> Vec<String> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    let (_, behind) = text.split_once("## Use it\n\n```sh\n").unwrap();
    let (block, _) = behind.split_once("```").unwrap();
    let lines = block.lines().map(|line| line.split('#').next().unwrap().trim_end());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn with_values(line: &str) -> String {
    let filled =
        VALUES.iter().fold(line.to_owned(), |line, (name, value)| line.replace(name, value));
    filled.replace("MOUNTPOINT", "PLACE/mnt").replace("PLACE", PLACE)
}

#[test]
fn use_it() {
    require!(fuse, root);
    let scratch = scratch_directory();
    let directory = scratch.path().canonicalize().unwrap();
    let _unmounting = Unmounting(directory.clone());
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    std::os::unix::fs::symlink(fixtures, directory.join("tests")).unwrap();
    for name in ["mnt", "remote"] {
        std::fs::create_dir(directory.join(name)).unwrap();
    }
    // Every mount of the block has a RAM tier here, so that its commands for one find it.
    let call = |line: usize, text: &str| {
        let text = format!("export KVFS_RAM=64M\n{}", with_values(text));
        let step = Step { line, text, ..Step::default() };
        run(&step, &directory).unwrap_or_else(|why| panic!("README, Use it, {why}"));
    };
    let (mut is_mounted, mut ran) = (false, 0);
    let mut skipped = NOT_RUN.map(|(beginning, _)| (beginning, 0));
    for (line, command) in commands().iter().enumerate() {
        if let Some((_, count)) =
            skipped.iter_mut().find(|(beginning, _)| command.starts_with(beginning))
        {
            *count += 1;
            continue;
        }
        if command.starts_with("kvfs mount ") {
            if is_mounted {
                call(line, "kvfs umount MOUNTPOINT");
            }
            is_mounted = true;
        }
        call(line, command);
        if command.contains("models/llama3-8b") {
            call(line, PREPARATION);
        }
        ran += 1;
    }
    assert!(ran >= 25, "only {ran} commands were run");
    assert!(skipped.iter().all(|(_, count)| *count > 0), "{skipped:?}");
    let asked = forks::output(Command::new("mountpoint").arg(directory.join("mnt")));
    assert!(!asked.status.success(), "it is mounted still");
}

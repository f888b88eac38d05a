//! Documents for those who run kvfs, held to what the program does: commands of `console` blocks are run in
//! order on real mounts and must end, and print, as the document says; messages that are explained are those of
//! the sources.
//!
//! `$ COMMAND` is run, with `/srv/kvfs` replaced by a directory of the test; a line that ends in `\` goes on. Lines below it
//! must be printed in that order, others may come between; `...` stands for anything. `# exits with N` behind a
//! command names its status where that is not 0. Blocks of other languages are not run, which is said: that the program
//! understands those of `sh` is for `src/cli/arguments/documented.rs`, and README's are run line by line.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[macro_use]
mod common;
#[path = "documents/chart.rs"]
mod chart;
#[path = "documents/readme.rs"]
mod readme;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::mount::scratch_directory;
use common::{Mode, Mount, forks};

/// Where documents have their store, mountpoint and everything else.
const PLACE: &str = "/srv/kvfs";
/// What less of a message stays the same would be found anywhere.
const FIXED_CHARS_MIN: usize = 10;

/// A command of a document.
#[derive(Debug, Default)]
struct Step {
    line: usize,
    text: String,
    exits_with: i32,
    printed: Vec<String>,
}

/// The commands of a document, and how many lines of shell it has beside them that are not run.
#[derive(Debug, Default)]
struct Steps {
    run: Vec<Step>,
    not_run: usize,
}

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
    std::fs::read_to_string(path).unwrap()
}

fn exit_status(command: &str) -> i32 {
    let said = command.rsplit_once("# exits with ").map(|(_, status)| status.trim().parse());
    said.map_or(0, Result::unwrap)
}

fn steps(text: &str) -> Steps {
    let mut found = Steps::default();
    let mut language = None;
    let mut goes_on = false;
    for (number, line) in text.lines().enumerate() {
        if let Some(fence) = line.trim_start().strip_prefix("```") {
            language = if language.is_none() { Some(fence) } else { None };
            assert!(!goes_on, "line {number}: the command does not end");
            continue;
        }
        match language {
            Some("console") if goes_on => {
                let step = found.run.last_mut().unwrap();
                step.text = format!("{}\n{line}", step.text);
            }
            Some("console") => match (line.strip_prefix("$ "), found.run.last_mut()) {
                (Some(command), _) => found.run.push(Step {
                    line: number + 1,
                    text: command.to_owned(),
                    ..Step::default()
                }),
                (None, Some(step)) => step.printed.push(line.trim_end().to_owned()),
                (None, None) => panic!("line {}: nothing has printed this", number + 1),
            },
            Some("sh") if !line.is_empty() && !line.starts_with('#') => found.not_run += 1,
            _ => {}
        }
        goes_on = language == Some("console") && line.ends_with('\\');
    }
    assert!(language.is_none(), "a block has no end");
    for step in &mut found.run {
        step.exits_with = exit_status(&step.text);
    }
    found
}

/// Whether a text is a pattern in which `...` stands for anything.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((first, behind)) = pattern.split_once("...") else { return text == pattern };
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let (middle, last) = behind.rsplit_once("...").unwrap_or(("", behind));
    for part in middle.split("...") {
        match rest.split_once(part) {
            Some((_, behind)) => rest = behind,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Runs a command and compares how it ended and what it printed.
fn run(step: &Step, directory: &Path) -> Result<(), String> {
    let place = directory.to_str().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_kvfs")).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    shell.args(["-ec", &step.text.replace(PLACE, place)]).current_dir(directory);
    shell.env("PATH", format!("{}:{path}", program.display())).env("LC_ALL", "C");
    // Not into the log directory of this machine.
    shell.env("KVFS_LOG_FILE", directory.join("kvfs.log")).env("HOME", directory);
    let ended = forks::output(&mut shell);
    let mut printed = String::from_utf8_lossy(&ended.stdout).into_owned();
    printed.push_str(&String::from_utf8_lossy(&ended.stderr));
    let printed = printed.replace(place, PLACE);
    let failed = |why: &str| {
        Err(format!("line {}: {}\n{why}; it printed:\n{printed}", step.line, step.text))
    };
    if ended.status.code() != Some(step.exits_with) {
        return failed(&format!("ended with {}, not {}", ended.status, step.exits_with));
    }
    let mut lines = printed.lines().map(str::trim_end);
    for expected in &step.printed {
        if !lines.any(|line| is_like(line, expected)) {
            return failed(&format!("has not printed {expected:?}"));
        }
    }
    Ok(())
}

fn run_all(name: &str, least: usize, directory: &Path) {
    let found = steps(&document(name));
    eprintln!("{name}: {} commands are run, {} are not", found.run.len(), found.not_run);
    assert!(found.run.len() >= least, "{name} has {} commands only", found.run.len());
    let directory = directory.canonicalize().unwrap();
    for step in &found.run {
        run(step, &directory).unwrap_or_else(|why| panic!("docs/{name}, {why}"));
    }
}

/// Unmounts what commands have left mounted below a directory.
struct Unmounting(PathBuf);

impl Drop for Unmounting {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(&self.0)) {
            let _ = forks::output(Command::new("umount").args(["-l", point]));
        }
    }
}

#[test]
fn operating() {
    require!(fuse, root, rsync, setfattr);
    let directory = scratch_directory();
    let _unmounting = Unmounting(directory.path().canonicalize().unwrap());
    run_all("operating.md", 60, directory.path());
}

#[test]
fn concepts() {
    require!(fuse, root, setfattr);
    let remote = scratch_directory();
    let options = ["--ram", "64M", "--cold", "zstd", "--remote", remote.path().to_str().unwrap()];
    let mount = Mount::with_options(Mode::Passthrough, &options);
    run_all("concepts.md", 10, mount.path().parent().unwrap());
}

#[test]
fn tuning() {
    require!(fuse, root);
    let remote = scratch_directory();
    let options = ["--ram", "64M", "--cold", "zstd", "--remote", remote.path().to_str().unwrap()];
    let mount = Mount::with_options(Mode::Passthrough, &options);
    run_all("tuning.md", 15, mount.path().parent().unwrap());
}

#[test]
fn a_command_that_does_something_else_is_found() {
    let directory = scratch_directory();
    let outcome = |text: &str| {
        let found = steps(&format!("```console\n{text}\n```\n```sh\n$ false\n# no command\n```\n"));
        assert_eq!(found.not_run, 1, "{text}");
        found.run.iter().try_for_each(|step| run(step, directory.path()))
    };
    outcome("$ true\n$ echo a b c; echo d\na ... c\nd\n$ exit 3 # exits with 3").unwrap();
    outcome("$ echo a \\\n  b >/dev/null\n$ echo /srv/kvfs/x\n/srv/kvfs/x").unwrap();
    for wrong in [
        "$ false",
        "$ true # exits with 1",
        "$ kvfs status --no-such-option",
        "$ false; true",
        "$ echo a b d\na ... c",
        "$ echo a; echo b\nb\na",
    ] {
        assert!(outcome(wrong).is_err(), "{wrong}");
    }
}

/// What stands in string literals of a source, without tests.
fn literals(source: &str) -> Vec<String> {
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    let mut found = Vec::new();
    let mut characters = source.chars().peekable();
    let mut previous = ' ';
    while let Some(character) = characters.next() {
        match (previous, character) {
            ('/', '/') => {
                characters.by_ref().find(|character| *character == '\n');
            }
            ('\'', '"') if characters.peek() == Some(&'\'') => {}
            (_, '"') => found.push(literal(&mut characters)),
            _ => {}
        }
        previous = character;
    }
    found
}

/// The rest of a literal, which is used up to its end.
fn literal(characters: &mut std::iter::Peekable<std::str::Chars<'_>>) -> String {
    let mut text = String::new();
    while let Some(character) = characters.next() {
        match character {
            '"' => break,
            '\\' => match characters.next() {
                Some('\n') => {
                    while characters.next_if(|character| character.is_whitespace()).is_some() {}
                }
                escaped => text.extend(escaped),
            },
            _ => text.push(character),
        }
    }
    text
}

/// Literals of everything that is compiled below a directory.
fn literals_below(directory: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        if path.is_dir() && !is_test {
            literals_below(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") && !is_test {
            found.extend(literals(&std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// The messages that a document explains: what stands in backticks at the beginning of a row.
fn messages(text: &str) -> Vec<String> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.map(|row| row.split_once("` |").expect("a message ends its cell").0);
    cells.map(|cell| cell.replace("\\|", "|")).collect()
}

fn check_message(message: &str, literals: &[String]) -> Result<(), String> {
    let fixed = message.split("...").map(|part| part.trim().chars().count()).max();
    if fixed.unwrap_or_default() < FIXED_CHARS_MIN {
        return Err(format!("{message:?} could be anything"));
    }
    let pattern = format!("...{message}...");
    let is_there = literals.iter().any(|literal| is_like(literal, &pattern));
    if is_there { Ok(()) } else { Err(format!("no source has {message:?}")) }
}

#[test]
fn messages_are_those_of_the_program() {
    let mut literals = Vec::new();
    for directory in ["crates", "src"] {
        literals_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join(directory), &mut literals);
    }
    assert!(literals.len() > 2000, "only {} literals were found", literals.len());
    let text = document("troubleshooting.md");
    let explained = messages(&text);
    assert!(explained.len() >= 90, "only {} messages are explained", explained.len());
    let wrong = explained.iter().filter_map(|message| check_message(message, &literals).err());
    assert_eq!(wrong.collect::<Vec<_>>(), [""; 0]);
    assert!(
        check_message("the store ... is in use by nobody: unmount it first", &literals).is_err()
    );
    assert!(check_message("... is ...", &literals).is_err());
}

#[test]
fn literals_are_read_as_the_compiler_does() {
    let source =
        "// \"no\"\nlet quote = '\"'; f(\"a \\\n   b \\\"c\\\"\", \"d//e\");\n#[cfg(test)] \"no\"";
    assert_eq!(literals(source), ["a b \"c\"", "d//e"]);
    let explained = messages("| message | what |\n|---|---|\n| `a \\| b: ...` | two `three` |\n");
    assert_eq!(explained, ["a | b: ..."]);
}

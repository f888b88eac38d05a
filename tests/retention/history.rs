//! What a limit deleted is told, and why, also after a crash.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::common::forks;
use crate::common::sys::sync_directory;
use crate::common::{Mode, Model, Mount, eventually};
use crate::writer::Sequence;
use crate::{FILE_BYTES, limit, wait_until_gone, write_files};

in_both_modes!(a_deleted_file_is_explained, a_cut_tells_which_tokens_went);
in_served_mode!(following_shows_what_happens_next, a_batch_is_one_line_of_the_log);

pub(crate) fn kvfs(arguments: &[&str], path: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::output(command.args(arguments).arg(path))
}

#[track_caller]
pub(crate) fn printed(arguments: &[&str], path: &Path) -> String {
    let output = kvfs(arguments, path);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn events(path: &Path) -> Vec<Value> {
    let text = printed(&["log", "--json"], path);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn a_deleted_file_is_explained(mode: Mode) {
    let mut mount = Mount::new(mode);
    let directory = mount.files("cache");
    std::fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 3);
    assert!(events(mount.path()).is_empty());
    // What its user removes is no event, and nothing is known of it.
    std::fs::remove_file(&files[2]).unwrap();
    let unknown = kvfs(&["explain"], &files[2]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("nothing is known of it"));
    limit(&directory, "quota", FILE_BYTES as u64 + 10_000);
    wait_until_gone(&files[0]);
    sync_directory(mount.path()).unwrap();
    let check = |mount: &Mount| {
        let events = events(&files[0]);
        assert_eq!(events.len(), 1, "{events:?}");
        let event = &events[0];
        assert_eq!(event["what"], "deleted");
        assert_eq!(event["path"], "files/cache/block-000.bin");
        assert_eq!(event["bytes"], FILE_BYTES);
        assert_eq!(event["reason"], "files/cache may hold 110000 bytes");
        assert!(event["used"].as_str().unwrap() <= event["time"].as_str().unwrap());
        assert_eq!(self::events(&directory), events);
        assert_eq!(self::events(mount.path()), events);
        assert!(self::events(&files[1]).is_empty());
        let text = printed(&["explain"], &files[0]);
        assert!(text.contains("where: it is not there\nwhy: deleted 20"), "{text}");
        assert!(
            text.contains("files/cache may hold 110000 bytes (97.6 KiB, last used 20"),
            "{text}"
        );
        assert!(text.contains("at most 107.4 KiB"), "{text}");
        let text = printed(&["explain"], &files[1]);
        let place = "where: on the disk: 1 file, 97.6 KiB; reading moves 97.6 KiB in 0.000 s";
        assert!(text.contains(place) && text.ends_with("events: none\n"), "{text}");
        let json: Value =
            serde_json::from_str(&printed(&["explain", "--json"], &files[0])).unwrap();
        assert_eq!((&json["is_there"], &json["events"][0]), (&Value::Bool(false), event));
        let table = printed(&["log"], &directory);
        assert!(
            table.contains("  deleted      files/cache/block-000.bin  files/cache may"),
            "{table}"
        );
    };
    check(&mount);
    mount.crash();
    check(&mount);
    mount.remount();
    check(&mount);
}

fn a_cut_tells_which_tokens_went(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "old");
    sequence.append(&mount, &model, &(0..100).collect::<Vec<_>>());
    let page = |layer, start| model.page_path(&mount, "old", layer, start);
    // Three pages and a tail in two layers: one page and the tails go.
    limit(&model.directory(&mount), "quota", 2 * (6 * 8192 + 2 * 4 * 128 + 400) - 60_000);
    wait_until_gone(&page(0, 64));
    let events = events(&model.sequence(&mount, "old"));
    let went = events.last().unwrap();
    assert_eq!(went["path"], "models/small/sequences/old");
    assert!(went["files"].as_u64().unwrap() >= 2, "{events:?}");
    assert!(went["from_token"].as_u64().unwrap() <= 64, "{events:?}");
    let text = printed(&["explain"], &page(1, 64));
    assert!(text.contains("why: models/small/sequences/old was deleted 20"), "{text}");
    assert!(self::events(&page(0, 0)).is_empty(), "the first page is still there");
    let text = printed(&["explain"], &page(0, 0));
    assert!(text.contains("where: on the disk"), "{text}");
}

fn following_shows_what_happens_next(mode: Mode) {
    use std::io::{BufRead, BufReader};
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    std::fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 2);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["log", "--follow"]).arg(&directory).stdout(std::process::Stdio::piped());
    let mut follower = forks::spawn(&mut command).unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap());
    limit(&directory, "quota", FILE_BYTES as u64 + 10_000);
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.contains("files/cache/block-000.bin"), "{line}");
    limit(&directory, "quota", 10);
    line.clear();
    lines.read_line(&mut line).unwrap();
    assert!(line.contains("files/cache/block-001.bin"), "{line}");
    follower.kill().unwrap();
    follower.wait().unwrap();
    assert!(!files[1].exists());
}

fn a_batch_is_one_line_of_the_log(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    std::fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 150);
    limit(&directory, "quota", 10);
    for file in &files {
        wait_until_gone(file);
    }
    let told = eventually("all to be told", || {
        let told = events(&directory);
        (told.len() == 150).then_some(told)
    });
    assert!(told.iter().all(|event| event["what"] == "deleted"));
    let numbers: Vec<_> = told.iter().map(|event| event["number"].as_u64()).collect();
    assert!(numbers.is_sorted());
    let log = mount.log();
    let lines = log.lines().filter(|line| line.contains("deleted beyond its limits")).count();
    assert!((1..150 / 10).contains(&lines), "{lines} lines");
}

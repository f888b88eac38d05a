//! `kvfs bench trace`: figures of a trace, and one line for each that is wrong. Nothing is mounted.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A line of a trace.
fn line(timestamp: u64, ids: &[u64]) -> String {
    let tokens = 512 * ids.len();
    format!(
        "{{\"timestamp\": {timestamp}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n"
    )
}

/// Some conversations that share a beginning and go on by turns.
fn conversations() -> String {
    let mut text = String::new();
    for round in 1..20_u64 {
        for conversation in 0..30_u64 {
            let own = (0..round).map(|page| 1000 * conversation + 100 + page);
            let ids: Vec<u64> = (0..10).chain(own).collect();
            text += &line(round * 1000 + conversation, &ids);
        }
    }
    text
}

fn bench(files: &[&Path], options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["bench", "trace"]).args(files).args(options).output().unwrap()
}

fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn figures(output: &Output) -> Vec<(String, f64)> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = document["figures"].as_array().unwrap().iter();
    figures
        .map(|figure| {
            let (value, baseline) = (figure["value"].as_f64(), figure["baseline"].as_f64());
            assert!(baseline.is_some() && figure["unit"] == "share", "{figure}");
            (figure["name"].as_str().unwrap().to_owned(), value.unwrap())
        })
        .collect()
}

#[test]
fn figures_of_a_trace() {
    let directory = tempfile::tempdir().unwrap();
    let plain = write(directory.path(), "chat.jsonl", &conversations());
    let found = figures(&bench(&[&plain], &["--json", "--budget-share", "5,100"]));
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["chat_05_blocks", "chat_05_prefix", "chat_100_blocks", "chat_100_prefix"]);
    assert!(found[0].1 > 0.0 && found[0].1 < 1.0 && found[1].1 <= found[0].1, "{found:?}");
    assert!((found[2].1 - 1.0).abs() < 1e-9, "{found:?}");

    // The same compressed, with the defaults.
    let packed = directory.path().join("packed.jsonl.gz");
    let file = std::fs::File::create(&packed).unwrap();
    let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    encoder.write_all(conversations().as_bytes()).unwrap();
    encoder.finish().unwrap();
    let packed = figures(&bench(&[&packed], &["--json"]));
    assert_eq!(packed.len(), 12);
    assert!((packed[4].1 - found[0].1).abs() < 1e-9, "{packed:?}");
}

#[test]
fn tables_and_a_plot() {
    let directory = tempfile::tempdir().unwrap();
    let trace = write(directory.path(), "chat.jsonl", &conversations());
    let plot = directory.path().join("hits.svg");
    let table = directory.path().join("hits.md");
    let files = ["--plot", plot.to_str().unwrap(), "--markdown", table.to_str().unwrap()];
    let options = [&["--budget", "8G", "--token-size", "128K"][..], &files].concat();
    let output = bench(&[&trace], &options);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("570 requests") && text.contains(", 128\n"), "{text}");
    let table = std::fs::read_to_string(&table).unwrap();
    assert!(table.contains("| `chat_22.07_blocks` |"), "{table}");
    let image = std::fs::read_to_string(&plot).unwrap();
    for policy in ["kvfs", "LIRS", "LRU", "decayed", "ARC", "S3-FIFO", "W-TinyLFU", "Belady"] {
        assert!(text.contains(&format!("\n{policy} ")), "{policy}: {text}");
        assert!(image.contains(policy), "{policy}");
    }
}

#[test]
fn what_is_wrong_is_one_line_with_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let good = line(7, &[1, 2]);
    let mut long = String::new();
    write!(long, "{{\"x\": \"{}\"}}", "y".repeat(65 << 20)).unwrap();
    let cases = [
        ("empty", String::new(), ("line 1", "empty")),
        ("words", format!("{good}{good}words\n"), ("line 3", "no JSON")),
        ("cut", format!("{good}{}", &good[..30]), ("line 2", "no JSON")),
        ("text", format!("{good}{}", good.replace("[1", "[\"a\"")), ("line 2", "expected u64")),
        ("lacking", good.replace("input_length", "length"), ("line 1", "input_length")),
        ("back", format!("{good}{good}{}", line(6, &[1])), ("line 3", "time goes back")),
        ("long", format!("{good}{long}"), ("line 2", "longer than")),
    ];
    for (name, text, (number, expected)) in cases {
        let path = write(directory.path(), name, &text);
        let output = bench(&[&path], &["--json"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{name}: {error}");
        let said: Vec<&str> = error.lines().filter(|line| line.contains(name)).collect();
        let last = said.last().unwrap();
        assert!(last.contains(number) && last.contains(expected), "{name}: {error}");
    }
}

#[test]
fn a_file_s_name_cannot_write_to_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let trace = write(directory.path(), "a\u{1b}]0;b.jsonl", &line(0, &[1]));
    let wrong = write(directory.path(), "c\u{1b}]0;d", "words\n");
    for files in [[&*trace], [&*wrong]] {
        let output = bench(&files, &["--budget-share", "100"]);
        let said = [output.stdout, output.stderr].concat();
        assert!(!said.contains(&0x1b), "{}", String::from_utf8_lossy(&said));
    }
}

#[test]
fn options_that_make_no_sense() {
    let directory = tempfile::tempdir().unwrap();
    let trace = write(directory.path(), "chat.jsonl", &line(0, &[1]));
    let (plot, table) = (directory.path().join("p.svg"), directory.path().join("t.md"));
    let (plot, table) = (plot.to_str().unwrap(), table.to_str().unwrap());
    let refused: [(&[&Path], &[&str], &str); 10] = [
        (&[], &[], "needs a file"),
        (&[&trace], &["--compute-rate", "inf"], "more than 0"),
        (&[&trace], &["--hints", "--json"], "cannot be used with"),
        (&[&trace], &["--hints", "--markdown", table], "cannot be used with"),
        (&[&trace], &["--what-if", "--plot", plot], "cannot be used with"),
        (&[&trace], &["--what-if", "--markdown", table], "cannot be used with"),
        (&[Path::new("/nowhere.jsonl")], &[], "/nowhere.jsonl"),
        (&[&trace], &["--budget-share", "0"], "more than 0"),
        (&[&trace], &["--budget", "1M"], "no block"),
        (&[&trace], &["--compute-rate", "0"], "more than 0"),
    ];
    for (files, options, expected) in refused {
        let output = bench(files, options);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(expected), "{expected}: {error}");
    }
}

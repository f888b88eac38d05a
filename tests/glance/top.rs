//! `kvfs top`: figures that agree with the metrics, and a terminal that is left as it was found.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::common::{Mode, Model, Mount, eventually, forks, sys};
use crate::status::Stopped;
use crate::terminal::Terminal;
use crate::{complaint, kvfs, printed};

in_served_mode!(
    rates_agree_with_the_metrics,
    a_frame_is_text,
    the_terminal_is_left_as_it_was,
    another_size_is_drawn_at_once,
    a_mount_that_hangs_freezes_nothing,
    a_mount_that_comes_back_is_shown_again,
);

fn written(mount: &Mount) -> std::path::PathBuf {
    let model = Model::small();
    model.install(mount);
    let page = model.page_path(mount, "chat", 0, 0);
    sys::write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    page
}

fn top(words: &[&str], mount: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["top", "--interval", "200ms"]).args(words).arg(mount);
    command
}

fn rates_agree_with_the_metrics(mode: Mode) {
    const OPENS: u32 = 50;
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let page = written(&mount);
    let mut command = top(&["--json"], mount.path());
    let mut child = forks::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut look = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let opened = |line: &Value| {
        line["flows"]
            .as_array()
            .unwrap()
            .iter()
            .find(|flow| flow["name"] == "opened")
            .unwrap()
            .clone()
    };
    let first = look();
    assert!(opened(&first)["per_second"].is_null(), "nothing is known of the time before: {first}");
    let before = opened(&first)["total"].as_u64().unwrap();
    for _ in 0..OPENS {
        std::fs::read(&page).unwrap();
    }
    let mut counted = 0.0;
    let begin = Instant::now();
    let line = loop {
        let line = look();
        let rate = opened(&line)["per_second"].as_f64().unwrap();
        counted += rate * line["seconds"].as_f64().unwrap();
        if opened(&line)["total"] == before + u64::from(OPENS) && counted + 0.01 > f64::from(OPENS)
        {
            break line;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{counted} opens; {line}");
    };
    assert!((counted - f64::from(OPENS)).abs() < 0.01, "{counted}");
    assert_eq!(mount.metric("kvfs_opens_total"), before + u64::from(OPENS));
    let memory = &line["tiers"][0];
    assert_eq!(
        (&memory["name"], &memory["capacity_bytes"]),
        (&"memory".into(), &(64 << 20).into())
    );
    assert_eq!(memory["used_bytes"], mount.metric("kvfs_tier_used_bytes{tier=\"ram\"}"));
    assert_eq!(line["pages"], 1);
    let most = &line["last_opens"][0];
    assert_eq!(most["path"], "models/small/sequences/chat");
    assert_eq!(most["opens"], OPENS);
    // Nobody reads any more, which ends it.
    drop(lines);
    let status = eventually("the command to end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    assert_eq!(complaint(&child.wait_with_output().unwrap()), "");
}

fn a_frame_is_text(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    std::fs::read(written(&mount)).unwrap();
    for words in [&["top"][..], &["top", "--once"]] {
        let text = printed(&kvfs(words, &[mount.path()]));
        assert!(text.starts_with("ok  "), "{text}");
        for part in [
            "\nTiers  1 pages",
            " of 64.0 MiB",
            "Rates ",
            "opened ",
            "Last 1 opens  small 100 %\n",
            "100 %  models/small/sequences/chat\n",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains('\u{1b}'), "no colour in a pipe");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    let fields: Value =
        serde_json::from_str(&printed(&kvfs(&["top", "--json", "--once"], &[mount.path()])))
            .unwrap();
    assert_eq!((&fields["state"], &fields["pages"]), (&"ok".into(), &1.into()));
    let line = complaint(&kvfs(&["top"], &[Path::new("/")]));
    assert!(line.starts_with("kvfs: / is a mount of type "), "{line}");
    // A sequence's name brings nothing to the terminal.
    let hostile = mount.join("models/small/sequences/\u{1b}[2J\u{202e}\nok");
    sys::rename(mount.join("models/small/sequences/chat"), hostile).unwrap();
    let text = printed(&kvfs(&["top", "--once"], &[mount.path()]));
    assert!(text.contains("%  models/small/sequences/\\u{1b}[2J\\u{202e}\\nok\n"), "{text}");
}

fn the_terminal_is_left_as_it_was(mode: Mode) {
    let mount = Mount::new(mode);
    let ends: [&dyn Fn(&mut Terminal); 5] = [
        &|terminal| terminal.press(b"q"),
        &|terminal| terminal.press(b"\x1b"),
        &|terminal| terminal.press(b"\x03"),
        &|terminal| terminal.signal(Signal::SIGTERM),
        &|terminal| {
            // What other keys send is nothing.
            terminal.press(b"\x1b[Ax ");
            std::thread::sleep(Duration::from_millis(300));
            assert!(terminal.child.try_wait().unwrap().is_none(), "it has ended");
            terminal.press(b"q");
        },
    ];
    for (number, end) in ends.iter().enumerate() {
        let mut terminal = Terminal::start(&mut top(&[], mount.path()), 80, 24);
        terminal.shows("Requests");
        assert!(terminal.screen().starts_with("ok  "), "{}", terminal.screen());
        assert!(!terminal.is_as_before(), "keys come one by one");
        assert!(terminal.written().contains("\u{1b}[?1049h"), "a screen of its own");
        end(&mut terminal);
        assert_eq!(terminal.end().code(), Some(0), "{number}");
        assert!(terminal.is_as_before(), "{number}");
        let written = eventually("the other screen", || {
            Some(terminal.written()).filter(|written| written.contains("\u{1b}[?1049l"))
        });
        assert!(written.contains("\u{1b}[?25h"), "the cursor is hidden");
    }
}

fn another_size_is_drawn_at_once(mode: Mode) {
    let mount = Mount::new(mode);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["top", "--interval", "1h"]).arg(mount.path());
    let mut terminal = Terminal::start(&mut command, 80, 24);
    terminal.shows("bytes Requests");
    // In a narrow one sections are below each other; in the least one nothing is, and it goes on.
    for (columns, rows, text) in
        [(40, 30, "\nRequests"), (1, 1, "o\n"), (100, 30, "bytes Requests")]
    {
        terminal.resize(columns, rows);
        terminal.shows(text);
    }
    terminal.press(b"q");
    assert_eq!(terminal.end().code(), Some(0));
    assert!(terminal.is_as_before());
}

fn a_mount_that_hangs_freezes_nothing(mode: Mode) {
    let mount = Mount::new(mode);
    let mut terminal = Terminal::start(&mut top(&[], mount.path()), 80, 24);
    terminal.shows("Requests");
    let stopped = Stopped::new(&mount);
    terminal.shows("it has not answered for ");
    drop(stopped);
    eventually("an answer", || (!terminal.screen().contains("it has not answered")).then_some(()));
    let _stopped = Stopped::new(&mount);
    terminal.shows("it has not answered for ");
    let begin = Instant::now();
    terminal.press(b"q");
    assert_eq!(terminal.end().code(), Some(0));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(terminal.is_as_before());
}

fn a_mount_that_comes_back_is_shown_again(mode: Mode) {
    let mut mount = Mount::new(mode);
    let mut terminal = Terminal::start(&mut top(&[], mount.path()), 40, 12);
    terminal.shows("Tiers");
    mount.kill();
    eventually("the daemon to be missed", || {
        let screen = terminal.screen();
        (screen.contains("its daemon is gone") || screen.contains("not mounted any more"))
            .then_some(())
    });
    mount.mount();
    eventually("the mount to be shown again", || {
        let screen = terminal.screen();
        (!screen.contains("is gone") && !screen.contains("not mounted")).then_some(())
    });
    assert!(terminal.screen().contains("Tiers"), "{}", terminal.screen());
    mount.unmount();
    terminal.shows("it is not mounted any more: waiting");
    assert_eq!(terminal.end().code(), Some(0));
    let line = format!("kvfs: {} was unmounted", mount.path().display());
    eventually("why it ended", || terminal.written().contains(&line).then_some(()));
    assert!(terminal.is_as_before());
}

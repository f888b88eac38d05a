use std::time::Instant;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::sample::Sample;
use super::super::sampler::Told;
use super::super::text_of;
use super::*;

const PLAIN: Style = Style { is_coloured: false };
/// What no name or message may bring to a terminal.
const HOSTILE: &str = "a\u{1b}[2J\u{9b}\u{202e}\r\tb";

fn metrics(opens: u64) -> String {
    format!(
        "kvfs_pages 123456\nkvfs_open_files 7\n\
         kvfs_tier_used_bytes{{tier=\"ram\"}} 1073741824\nkvfs_tier_capacity_bytes{{tier=\"ram\"}} 4294967296\n\
         kvfs_tier_objects{{tier=\"ram\"}} 1200\nkvfs_tier_dirty_bytes{{tier=\"ram\"}} 4096\n\
         kvfs_tier_used_bytes{{tier=\"ssd\"}} 98\nkvfs_tier_capacity_bytes{{tier=\"ssd\"}} 100\n\
         kvfs_tier_free_bytes{{tier=\"ssd\"}} 2\nkvfs_tier_objects{{tier=\"ssd\"}} 3\n\
         kvfs_tier_used_bytes{{tier=\"remote\"}} 5\nkvfs_tier_objects{{tier=\"remote\"}} 6\n\
         kvfs_opens_total {opens}\nkvfs_opened_bytes_total {}\n\
         kvfs_moves_total{{from=\"ssd\",to=\"remote\"}} {opens}\n\
         kvfs_fuse_requests_total{{op=\"open\",result=\"ok\"}} {opens}\n\
         kvfs_fuse_request_duration_seconds_bucket{{op=\"open\",le=\"0.000016\"}} {opens}\n\
         kvfs_fuse_request_duration_seconds_bucket{{op=\"open\",le=\"0.131072\"}} {opens}\n\
         kvfs_fuse_request_duration_seconds_bucket{{op=\"open\",le=\"+Inf\"}} {}\n\
         kvfs_fuse_request_duration_seconds_count{{op=\"open\"}} {}\n\
         kvfs_match_asked_tokens_total {opens}00\nkvfs_match_answered_tokens_total{{store=\"own\"}} {opens}\n\
         kvfs_move_failures_total{{from=\"ssd\",to=\"remote\",error=\"{HOSTILE}\"}} 2\n",
        opens * 1024,
        opens + 3,
        opens + 3,
    )
}

fn sample(at: Instant, opens: u64) -> Sample {
    let status = format!(
        "pid: 7\nmountpoint: /mnt/kv{}\nstate: degraded\n\
         state_reason: the remote is down for 7 s: {}; the disk is full: 5 bytes are free\n\
         uptime_seconds: 11040\nremote_state: down: {}\nremote_waiting_files: 12\n",
        HOSTILE.replace('\r', ""),
        HOSTILE.replace('\r', ""),
        HOSTILE.replace('\r', "")
    );
    let event = |second: u32, reason: &str| {
        format!(
            "{{\"number\":9,\"time\":\"2026-11-25T02:41:0{second}.123Z\",\"what\":\"fetched\",\
         \"path\":{},\"reason\":\"{reason}\",\"files\":1,\"bytes\":4096}}\n",
            serde_json::json!(format!("models/m/sequences/chat/{HOSTILE}"))
        )
    };
    let events = (1..6).map(|second| event(second, "room")).collect::<String>()
        + &event(9, "only the remote had it").repeat(4);
    let hottest = format!("192 models/llama/sequences/chat\n62 models/{HOSTILE}\n2 -\n");
    let metrics = metrics(opens);
    Sample::of(Told { errno: 0, status, metrics, events, hottest }, at)
}

fn view() -> View {
    let begin = Instant::now();
    let before = sample(begin, 100);
    let now = sample(begin + Duration::from_secs(2), 300);
    View {
        place: "/mnt/kv".to_owned(),
        figures: Some(Figures::of(Some(&before), &now)),
        events: now.events.into(),
        notice: Some(format!("it has not answered for 4 s {HOSTILE}")),
        interval: Some(Duration::from_secs(1)),
        style: Style { is_coloured: true },
    }
}

fn drawn(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view.draw(frame.area(), frame.buffer_mut())).unwrap();
    text_of(terminal.backend().buffer())
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// What must be seen at any size that anybody uses.
const IMPORTANT: [&str; 6] = [
    "degraded",
    "the disk is full: 5 bytes are free",
    "it has not answered for 4 s",
    "memory   25 %",
    "disk     98 %",
    "remote",
];

#[test]
fn a_terminal_of_80_by_24() {
    let text = drawn(&view(), 80, 24);
    has(&text, &IMPORTANT);
    has(
        &text,
        &[
            "each 1 s  q ends",
            "up for 3 h 4 min",
            "123 456 pages  7 files open",
            "memory   25 % [##......] 1.0 GiB of 4.0 GiB      4.0 KiB not on disk yet  1 20",
            "98 bytes of 100 bytes   2 bytes free  3 objects",
            "12 files wait",
            "opened              100  100.0 KiB/s",
            "disk to remote      100",
            "open            100  16 us  16 us     3",
            "Last 256 opens  llama 75 %",
            "75 %  models/llama/sequences/chat\n",
            "0 %  elsewhere",
            "02:41:09  fetched    ..",
            " and 3 more  only the remote had i",
        ],
    );
}

#[test]
fn a_small_terminal_has_what_matters() {
    let text = drawn(&view(), 40, 12);
    has(&text, &IMPORTANT);
    has(&text, &["opened              100  100.0 KiB/s"]);
}

#[test]
fn a_large_terminal_has_everything() {
    let text = drawn(&view(), 200, 60);
    has(&text, &IMPORTANT);
    has(&text, &["prompt tokens found", "1 %", "2 not moved from disk to remote: a\\u{1b}[2J"]);
    assert_eq!(text.matches("  fetched  ").count(), 6, "{text}");
    has(&text, &[" and 3 more  only the remote had it (4 files, 16.0 KiB)"]);
}

#[test]
fn any_size_is_drawn() {
    let view = view();
    for width in [0, 1, 2, 3, 7, 20, 38, 39, 77, 78, 79, 300] {
        for height in [0, 1, 2, 3, 9, 100] {
            let text = drawn(&view, width, height);
            assert_eq!(text.lines().count(), usize::from(height), "{width} by {height}");
            view.height(width);
        }
    }
}

#[test]
fn nothing_controls_the_terminal() {
    for (width, height) in [(80, 24), (40, 12), (200, 60)] {
        let text = drawn(&view(), width, height);
        let is_harmless = |c: char| c == '\n' || !c.is_control() && c != '\u{202e}';
        assert!(text.chars().all(is_harmless), "{text:?}");
        assert!(text.contains("\\u{1b}[2J"), "{text}");
    }
}

#[test]
fn without_figures_the_mount_is_named() {
    let mut view = view();
    view.figures = None;
    has(&drawn(&view, 80, 24), &["/mnt/kv", "it has not answered"]);
}

#[test]
fn a_mount_that_tells_nothing_is_drawn() {
    let told = Told { status: "state: ok\n".to_owned(), ..Told::default() };
    let figures = Figures::of(None, &Sample::of(told, Instant::now()));
    let view = View { figures: Some(figures), notice: None, events: VecDeque::new(), ..view() };
    let text = drawn(&view, 80, 24);
    assert_eq!(text.trim_end(), format!("ok  ?{:>75}", "each 1 s  q ends"));
}

#[test]
fn what_is_not_known_is_no_number() {
    let figures = Figures::of(None, &sample(Instant::now(), 100));
    let view = View { figures: Some(figures), style: PLAIN, ..view() };
    has(
        &drawn(&view, 80, 24),
        &["opened                -", "open              -      -      -     3"],
    );
}

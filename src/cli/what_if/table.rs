//! The answer, for people and programs.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::{Answer, Row};
use crate::cli::duration::age;
use crate::cli::history::shown;
use crate::cli::output::{bytes, grouped, short};
use crate::tier::counters::Tier;
use crate::tier::what_if::{Played, Seen};

/// With fewer uses a table says more about chance than about budgets.
const USES_MIN: u64 = 1000;

/// For people.
pub(super) fn to_text(mountpoint: &Path, seen: &Seen, answers: &[Answer]) -> String {
    let mut text = head(mountpoint, seen);
    if seen.uses == 0 {
        return text;
    }
    for answer in answers {
        add_answer(answer, &mut text);
    }
    if answers.iter().all(|answer| answer.tier != Tier::Ssd) {
        text.push_str(
            "\nDisk: the mount has no remote, so nothing leaves the disk, whatever its budget is.\n",
        );
    }
    let rows = || answers.iter().flat_map(|answer| &answer.rows);
    if rows().any(|row| row.played.is_rough) {
        text.push_str(
            "\n~ The sample has room for few of its files there: the true figure may be another one.\n",
        );
    }
    text
}

/// What the answer rests on.
fn head(mountpoint: &Path, seen: &Seen) -> String {
    let place = shown(mountpoint);
    if seen.uses == 0 {
        return format!(
            "{place}: no file was opened to be read since it was mounted, so nothing can be told\n"
        );
    }
    let since = if seen.is_whole { "since it was mounted: " } else { "the last ones: " };
    let mut text = format!("{place}: {since}{} opens in {}", grouped(seen.uses), age(seen.seconds));
    // Writing to a String cannot fail.
    let _ = match seen.sampling_bits {
        0 => writeln!(text, ", all of them remembered"),
        bits => writeln!(
            text,
            ", those of one file in {} remembered, {} files",
            grouped(1 << bits),
            grouped(seen.objects() as u64)
        ),
    };
    if seen.uses < USES_MIN {
        let _ = writeln!(
            text,
            "That is little: ask again after {} opens before you choose a budget.",
            grouped(USES_MIN)
        );
    }
    text
}

fn add_answer(answer: &Answer, text: &mut String) {
    let (name, below) = words(answer.tier);
    let now = match (answer.present_bytes, answer.tier) {
        (Some(budget), _) => format!("{} now", bytes(budget)),
        (None, Tier::Ram) => "none now".to_owned(),
        (None, _) => "no limit now".to_owned(),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\n{name}, {now}: {:.3} of the opens found their file there, {:.3} if the budget was this one all the time",
        answer.counted.found_share(),
        answer.modelled.found_share()
    );
    let loaded = format!("from the {below}");
    let _ = writeln!(
        text,
        "  {:<22}{:>7}{:>16}{:>16}{loaded:>18}{:>15}",
        "budget", "found", "tokens found", "more than now", "seconds saved"
    );
    for row in &answer.rows {
        add_row(answer, row, text);
    }
    if answer.rate.is_none() {
        text.push_str(match answer.tier {
            Tier::Ram => "  Seconds are told with --disk-rate.\n",
            _ => "  Seconds are told once the mount has fetched enough to know the rate of its remote.\n",
        });
    }
}

fn add_row(answer: &Answer, row: &Row, text: &mut String) {
    let played = &row.played;
    let mark = match (row.is_asked, row.is_present) {
        (true, _) => " (asked)",
        (false, true) => " (now)",
        (false, false) => "",
    };
    let budget = format!("{}{mark}", bytes(row.budget_bytes));
    let rough = if played.is_rough { "~" } else { "" };
    let found = format!("{rough}{:.3}", played.found_share());
    let more = played.found_tokens - answer.modelled.found_tokens;
    let sign = if more <= -0.5 { "-" } else { "" };
    let saved = saved_seconds(answer, row).map_or_else(|| "-".to_owned(), short);
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "  {budget:<22}{found:>7}{:>16}{:>16}{:>18}{saved:>15}",
        grouped(whole(played.found_tokens)),
        format!("{sign}{}", grouped(whole(more.abs()))),
        bytes(whole(played.loaded_bytes)),
    );
}

/// For programs.
pub(super) fn to_json(mountpoint: &Path, seen: &Seen, answers: &[Answer]) -> Value {
    let tiers = answers.iter().map(|answer| {
        let rows = answer.rows.iter().map(|row| {
            let mut fields = figures(&row.played);
            fields["budget_bytes"] = json!(row.budget_bytes);
            fields["is_present"] = json!(row.is_present);
            fields["is_asked"] = json!(row.is_asked);
            fields["is_rough"] = json!(row.played.is_rough);
            fields["seconds_saved"] = json!(saved_seconds(answer, row));
            fields
        });
        json!({
            "tier": answer.tier.name(),
            "budget_bytes": answer.present_bytes,
            "counted": figures(&answer.counted),
            "modelled": figures(&answer.modelled),
            "loaded_bytes_per_second": answer.rate,
            "budgets": rows.collect::<Vec<_>>(),
        })
    });
    json!({
        "mountpoint": mountpoint.display().to_string(),
        "uses": seen.uses,
        "seconds": seen.seconds,
        "since_mount": seen.is_whole,
        "one_file_in": 1_u64 << seen.sampling_bits,
        "files": seen.objects(),
        "tiers": tiers.collect::<Vec<_>>(),
    })
}

fn figures(played: &Played) -> Value {
    json!({
        "found_share": played.found_share(),
        "found": whole(played.found),
        "tokens_found": whole(played.found_tokens),
        "loaded_bytes": whole(played.loaded_bytes),
    })
}

/// The tier, and where comes from what it does not have.
fn words(tier: Tier) -> (&'static str, &'static str) {
    if tier == Tier::Ram { ("Memory", "disk") } else { ("Disk", "remote") }
}

/// What loading would have taken less than with the present budget.
#[expect(clippy::cast_precision_loss, reason = "an estimate of a few digits")]
fn saved_seconds(answer: &Answer, row: &Row) -> Option<f64> {
    let rate = answer.rate?;
    Some((answer.modelled.loaded_bytes - row.played.loaded_bytes) / rate as f64)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "estimates that are not negative, far below 2^63"
)]
fn whole(number: f64) -> u64 {
    number.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(found: f64, tokens: f64) -> Played {
        Played {
            uses: 2000.0,
            found,
            bytes: 2e9,
            loaded_bytes: (2000.0 - found) * 1e6,
            tokens: 4e6,
            found_tokens: tokens,
            is_rough: false,
        }
    }

    fn answer(tier: Tier, rate: Option<u64>) -> Answer {
        let row = |budget_bytes, found, tokens| Row {
            budget_bytes,
            is_present: budget_bytes == 2 << 30,
            is_asked: budget_bytes == 3 << 30,
            played: played(found, tokens),
        };
        let mut rows =
            vec![row(1 << 30, 500.0, 1e6), row(2 << 30, 1000.0, 2e6), row(3 << 30, 1500.0, 3e6)];
        rows[0].played.is_rough = true;
        let modelled = played(1000.0, 2e6);
        let (present_bytes, counted) = (Some(2 << 30), played(1020.0, 2e6));
        Answer { tier, present_bytes, counted, modelled, rate, rows }
    }

    fn seen(uses: u64, sampling_bits: u32) -> Seen {
        let head = format!(
            "kvfs uses 1\nsampling_bits: {sampling_bits}\nuses: {uses}\nseconds: 7200\nis_whole: true\n\n"
        );
        Seen::parse(head.as_bytes()).unwrap()
    }

    #[test]
    fn people_get_a_table() {
        let answers = [answer(Tier::Ram, None), answer(Tier::Ssd, Some(100_000_000))];
        let text = to_text(Path::new("/mnt"), &seen(2000, 3), &answers);
        let expected = "\
/mnt: since it was mounted: 2 000 opens in 2 h, those of one file in 8 remembered, 0 files

Memory, 2.0 GiB now: 0.510 of the opens found their file there, 0.500 if the budget was this one all the time
  budget                  found    tokens found   more than now     from the disk  seconds saved
  1.0 GiB                ~0.250       1 000 000      -1 000 000           1.3 GiB              -
  2.0 GiB (now)           0.500       2 000 000               0         953.6 MiB              -
  3.0 GiB (asked)         0.750       3 000 000       1 000 000         476.8 MiB              -
  Seconds are told with --disk-rate.

Disk, 2.0 GiB now: 0.510 of the opens found their file there, 0.500 if the budget was this one all the time
  budget                  found    tokens found   more than now   from the remote  seconds saved
  1.0 GiB                ~0.250       1 000 000      -1 000 000           1.3 GiB          -5.00
  2.0 GiB (now)           0.500       2 000 000               0         953.6 MiB              0
  3.0 GiB (asked)         0.750       3 000 000       1 000 000         476.8 MiB           5.00

~ The sample has room for few of its files there: the true figure may be another one.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn little_is_called_little() {
        let text = to_text(Path::new("/mnt"), &seen(0, 0), &[answer(Tier::Ram, None)]);
        assert_eq!(
            text,
            "/mnt: no file was opened to be read since it was mounted, so nothing can be told\n"
        );
        let text = to_text(Path::new("/mnt"), &seen(999, 0), &[answer(Tier::Ram, None)]);
        assert!(
            text.contains("999 opens in 2 h, all of them remembered\nThat is little"),
            "{text}"
        );
        assert!(text.contains("\nDisk: the mount has no remote"), "{text}");
        let mut cut = seen(5000, 0);
        cut.is_whole = false;
        let text = to_text(Path::new("/mnt"), &cut, &[]);
        assert!(text.starts_with("/mnt: the last ones: 5 000 opens"), "{text}");
    }

    #[test]
    fn programs_get_the_same() {
        let answers = [answer(Tier::Ram, Some(1_000_000_000))];
        let told = to_json(Path::new("/mnt"), &seen(2000, 3), &answers);
        assert_eq!((&told["uses"], &told["one_file_in"]), (&json!(2000), &json!(8)));
        let tier = &told["tiers"][0];
        assert_eq!((&tier["tier"], &tier["counted"]["found_share"]), (&json!("ram"), &json!(0.51)));
        let row = &tier["budgets"][2];
        assert_eq!((&row["is_asked"], &row["is_present"]), (&json!(true), &json!(false)));
        assert_eq!((&row["tokens_found"], &row["seconds_saved"]), (&json!(3_000_000), &json!(0.5)));
        assert_eq!(tier["budgets"][0]["is_rough"], json!(true));
    }
}

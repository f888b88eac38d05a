//! How a command ends: text and an exit code, or one line that says what is wrong.
//!
//! Commands build their text and return it, so that a closed pipe (`kvfs inspect ... | head`) is
//! handled once, here.

use std::fmt::{Display, Write as _};
use std::io::{self, Write};
use std::process::ExitCode;

use crate::page::printable;

/// Everything went well.
pub(crate) const EXIT_OK: u8 = 0;
/// The command failed.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The arguments make no sense.
pub(crate) const EXIT_USAGE: u8 = 2;
/// `fsck` did its work and found errors.
pub(crate) const EXIT_FSCK_ERRORS: u8 = 3;

/// What a command that did its work prints, and its exit code.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// For standard output, ending in a line feed where it is not empty.
    pub text: String,
    /// The exit code.
    pub exit: u8,
    /// The exit code if standard output takes nothing.
    pub unwritten: u8,
}

impl Default for Report {
    fn default() -> Report {
        Report { text: String::new(), exit: EXIT_OK, unwritten: EXIT_FAILED }
    }
}

impl Report {
    /// A report of success.
    pub(crate) fn text(text: String) -> Report {
        Report { text, ..Report::default() }
    }

    /// A report of work that ended like this.
    pub(crate) fn ending(text: String, exit: u8) -> Report {
        Report { text, exit, ..Report::default() }
    }

    /// A report of success as whoever asked wants it: one JSON document with fields of stable names, or text.
    pub(crate) fn answer(is_json: bool, value: &serde_json::Value, text: String) -> Report {
        if is_json { Report::json(value) } else { Report::text(text) }
    }

    /// A report of success as one JSON document.
    pub(crate) fn json(value: &serde_json::Value) -> Report {
        Report::text(json_text(&format!("{value:#}\n")))
    }
}

/// Why a command did not do its work; the text is one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The user asked for something that makes no sense.
    Usage(String),
    /// It could not be done.
    Failed(String),
}

impl Failure {
    /// A failure from any error or line.
    pub(crate) fn failed(line: impl Display) -> Failure {
        Failure::Failed(line.to_string())
    }

    /// The line.
    pub(crate) fn line(&self) -> &str {
        match self {
            Failure::Usage(line) | Failure::Failed(line) => line,
        }
    }

    fn exit(&self) -> u8 {
        match self {
            Failure::Usage(_) => EXIT_USAGE,
            Failure::Failed(_) => EXIT_FAILED,
        }
    }
}

/// How a command ends.
pub(crate) type Outcome = Result<Report, Failure>;

/// Prints how a command ended.
pub(crate) fn finish(program: &str, outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(report) => ExitCode::from(print(&report)),
        Err(failure) => {
            complain(program, failure.line());
            ExitCode::from(failure.exit())
        }
    }
}

fn print(report: &Report) -> u8 {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(report.text.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Ok(()) => report.exit,
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => report.exit,
        Err(error) => {
            complain("kvfs", &format!("standard output cannot be written: {error}"));
            report.unwritten
        }
    }
}

/// Prints clap's help, version or error. Help goes to standard output and is no failure.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let exit = if error.use_stderr() { EXIT_USAGE } else { EXIT_OK };
    // Nobody is left to tell if this cannot be printed.
    let _ = error.print();
    ExitCode::from(exit)
}

/// One line of trouble on standard error.
pub(crate) fn complain(program: &str, line: &str) {
    note(&format!("{program}: {}", mended(&printable(line.chars()))));
}

/// What a system call says of a mount without a daemon, in words that help.
fn mended(line: &str) -> String {
    line.replace(
        "Transport endpoint is not connected (os error 107)",
        "the daemon of this mount is gone: mount the store again, which clears it",
    )
}

/// One line for people on standard error, where it does not disturb `--json`.
pub(crate) fn note(line: &str) {
    // Unlike eprintln this does not panic where standard error is closed.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// JSON whose strings keep the control characters that JSON would let through, such as DEL, escaped.
pub(crate) fn json_text(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_control() && character != '\n' {
            let _ = write!(text, "\\u{:04x}", u32::from(character));
        } else {
            text.push(character);
        }
    }
    text
}

/// A number of bytes for people: `4.0 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} bytes");
    }
    let mut unit = 0;
    let mut tenths = u128::from(count) * 10 / 1024;
    while tenths >= 10240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// `1 page`, `2 pages`.
pub(crate) fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// `1 234 567`: digits in threes can be read at a glance.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A number in few letters.
pub(crate) fn short(number: f64) -> String {
    match number.abs() {
        0.0 => "0".to_owned(),
        0.001..0.9995 => format!("{number:.3}"),
        0.9995..9.995 => format!("{number:.2}"),
        9.995..99.95 => format!("{number:.1}"),
        99.95..1e6 => format!("{number:.0}"),
        _ => format!("{number:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_cannot_control_a_terminal() {
        let value = serde_json::json!({ "a": "\u{1b}\n\u{7f}\u{9b}é" });
        let report = Report::json(&value);
        assert!(report.text.chars().all(|character| character == '\n' || !character.is_control()));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&report.text).unwrap(), value);
    }

    #[test]
    fn a_mount_without_a_daemon_is_told_with_what_mends_it() {
        let error = io::Error::from_raw_os_error(libc::ENOTCONN);
        let expected =
            "/mnt/kv: the daemon of this mount is gone: mount the store again, which clears it";
        assert_eq!(mended(&format!("/mnt/kv: {error}")), expected);
        assert_eq!(mended("/mnt/kv: something else"), "/mnt/kv: something else");
    }

    #[test]
    fn bytes_for_people() {
        fn check(count: u64, expected: &str) {
            assert_eq!(bytes(count), expected);
        }
        check(0, "0 bytes");
        check(1023, "1023 bytes");
        check(1024, "1.0 KiB");
        check(1536, "1.5 KiB");
        check((4 << 20) + 4096, "4.0 MiB");
        check(5 << 40, "5.0 TiB");
        check(u64::MAX, "16777215.9 TiB");
    }

    #[test]
    fn numbers_in_few_letters() {
        for (number, expected) in [
            (0.0, "0"),
            (-0.5, "-0.500"),
            (0.9996, "1.00"),
            (9.996, "10.0"),
            (123.4, "123"),
            (1e-7, "1.00e-7"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(number), expected);
        }
    }

    #[test]
    fn digits_in_threes() {
        for (number, expected) in
            [(0, "0"), (999, "999"), (1000, "1 000"), (12_345_678, "12 345 678")]
        {
            assert_eq!(grouped(number), expected);
        }
    }
}

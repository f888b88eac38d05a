//! A configuration file with every setting at its default, commented out, for `kvfs config init`.

use std::fmt::Write;

use super::{Value, of_a_file};

const HEAD: &str = "\
# Settings of a kvfs mount: kvfs mount --config FILE STORE MOUNTPOINT
#
# What is commented out is the default. Sizes are bytes or text with K, M, G or T (\"4G\"), times are seconds
# or text with ms, s, m, h, d or w (\"15m\"). Arguments, -o and variables count before this file.
# kvfs config check FILE tells what is wrong in it, kvfs config show MOUNTPOINT what a mount uses.
";

/// The file.
pub(crate) fn template() -> String {
    let mut text = HEAD.to_owned();
    for setting in of_a_file() {
        let change = if setting.is_live { " Can change while the mount is used." } else { "" };
        let variable = setting.variables.join(" or ");
        let _ = write!(text, "\n# {}{change} ({variable})\n", setting.about);
        let shown = setting.default.unwrap_or(setting.example);
        let value = Value::parse(setting.kind, setting.name, shown);
        let value = value.map_or_else(|_| format!("{shown:?}"), |value| value.to_toml());
        let note = if setting.default.is_none() { "  # for example: it is not set" } else { "" };
        let _ = writeln!(text, "#{} = {value}{note}", setting.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::read_file;

    /// The file with its settings in force.
    fn in_force(keep: impl Fn(&str) -> bool) -> String {
        let text = template();
        let lines = text.lines().map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') && keep(setting) => setting,
            _ => line,
        });
        lines.fold(String::new(), |text, line| text + line + "\n")
    }

    #[test]
    fn as_it_is_it_says_nothing() {
        let found = read_file(&template());
        assert_eq!((found.errors, found.lines.len()), (Vec::new(), 0));
    }

    #[test]
    fn every_line_of_it_is_right_and_says_the_default() {
        let found = read_file(&in_force(|_| true));
        assert_eq!(found.errors, []);
        assert_eq!(found.lines.len(), of_a_file().count());
        for setting in of_a_file() {
            let shown = setting.default.unwrap_or(setting.example);
            let expected = Value::parse(setting.kind, setting.name, shown).unwrap();
            assert_eq!(found.layer.get(setting.name), Some(&expected), "{}", setting.name);
        }
    }
}

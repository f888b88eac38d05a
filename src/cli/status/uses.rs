//! What was asked of a model or directory and found, in words.

use crate::cli::output::{bytes, grouped};

/// A line's fields: `name=number`.
struct Fields<'a>(&'a str);

impl Fields<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        let mut fields = self.0.split(' ').filter_map(|field| field.split_once('='));
        fields.find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}

/// Of what a line `model PATH` says; as it came, if it says something else.
pub(super) fn of_model(value: &str) -> String {
    let fields = Fields(value);
    in_words_of_model(&fields).unwrap_or_else(|| value.to_owned())
}

fn in_words_of_model(fields: &Fields<'_>) -> Option<String> {
    let questions = fields.number("questions")?;
    let asked = found("tokens", fields.number("answered_tokens")?, fields.number("asked_tokens")?);
    let mut parts = Vec::new();
    if questions > 0 {
        let prompts = if questions == 1 { "prompt" } else { "prompts" };
        parts.push(format!("{} {prompts} asked, {asked}", grouped(questions)));
    }
    if let (Some(prefixes @ 1..), Some(here)) =
        (fields.number("prefixes"), fields.number("prefixes_found"))
    {
        parts.push(found("prefixes", here, prefixes));
    }
    if let (Some(tokens @ 1..), Some(time)) =
        (fields.number("restored_tokens"), fields.text("opening_seconds"))
    {
        parts.push(format!("{} tokens restored in {time} s", grouped(tokens)));
    }
    if let (Some(saved), Some(rate)) = (fields.text("saved_seconds"), fields.number("prefill_rate"))
    {
        let rate = grouped(rate);
        parts.push(format!("{saved} s saved, at {rate} tokens computed a second"));
    }
    Some(parts.join("; "))
}

/// Of what a line `directory PATH` says.
pub(super) fn of_directory(value: &str) -> String {
    let fields = Fields(value);
    in_words_of_directory(&fields).unwrap_or_else(|| value.to_owned())
}

fn in_words_of_directory(fields: &Fields<'_>) -> Option<String> {
    let names = found("names", fields.number("names_found")?, fields.number("names")?);
    let opens = fields.number("opens")?;
    let files = if opens == 1 { "file" } else { "files" };
    let size = bytes(fields.number("opened_bytes")?);
    Some(format!("{names}; {} {files} opened, {size}", grouped(opens)))
}

fn found(what: &str, found: u64, asked: u64) -> String {
    let percent = u128::from(found) * 100 / u128::from(asked.max(1));
    format!("{} of {} {what} found ({percent} %)", grouped(found), grouped(asked))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_happened_is_told() {
        let line = "questions=0 asked_tokens=0 answered_tokens=0 prefixes=3 prefixes_found=2 opens=4 \
                    restored_tokens=12800 opening_seconds=0.250 prefill_rate=3200 saved_seconds=3.8";
        assert_eq!(
            of_model(line),
            "2 of 3 prefixes found (66 %); 12 800 tokens restored in 0.250 s; \
             3.8 s saved, at 3 200 tokens computed a second"
        );
        assert_eq!(
            of_model("questions=2 asked_tokens=10 answered_tokens=5"),
            "2 prompts asked, 5 of 10 tokens found (50 %)"
        );
    }

    #[test]
    fn what_is_not_known_is_shown_as_it_came() {
        for line in ["", "something=1", "questions=many"] {
            assert_eq!((of_model(line), of_directory(line)), (line.to_owned(), line.to_owned()));
        }
    }
}

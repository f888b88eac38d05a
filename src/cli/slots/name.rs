//! What a conversation's sequence is called: by its first words, when it was saved, the model, and its tokens.
//!
//! `now-it-came-to-pass.2026-11-26T0650Z.llama-8b.5e8f3c21a97d`: people know it by the first parts. The last
//! one is a hash of the tokens, so that a conversation is found again when it has not changed, and nothing is
//! taken for one that was saved here but what is called by its own tokens.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::server::Server;
use crate::page::calendar::date_of;

/// Hexadecimal digits of a hash: among millions of conversations no two have the same 48 bits, and tokens are
/// compared where one is found.
const HASH_DIGITS: usize = 12;
/// Digits of conversations that were called by their hash alone.
const OLD_DIGITS: usize = 32;
const TITLE_CHARS_MAX: usize = 40;
const MODEL_CHARS_MAX: usize = 32;
/// Of a conversation without a word.
const UNTITLED: &str = "untitled";
/// The first words stand behind what tells a model how to behave, which may be long.
const TITLE_TOKENS_MAX: usize = 16 << 10;
const DAY_SECONDS: u64 = 86_400;

/// The hash of tokens, as long as any name has it.
fn hash(tokens: &[u32]) -> String {
    let mut hasher = blake3::Hasher::new();
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.finalize().to_hex()[..OLD_DIGITS].to_owned()
}

/// Tells whether a sequence is called by these tokens, which it then was here.
pub(super) fn caller(tokens: &[u32]) -> impl Fn(&str) -> bool {
    let hash = hash(tokens);
    move |name| {
        let end = name.rsplit_once('.').map(|(_, end)| end);
        name == hash || end == Some(&hash[..HASH_DIGITS])
    }
}

/// Whether a name has the form of those that conversations get here.
pub(super) fn is_of_conversation(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    let is_hash = |digits: &str, length| {
        digits.len() == length && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    match parts[..] {
        [name] => is_hash(name, OLD_DIGITS),
        [_, _, _, end] => is_hash(end, HASH_DIGITS),
        _ => false,
    }
}

/// The first words of a conversation that has such a name.
pub(super) fn title_of(name: &str) -> Option<&str> {
    let title = name.split('.').next()?;
    (is_of_conversation(name) && title != name && title != UNTITLED).then_some(title)
}

/// Names that tell which server and model they come from.
#[derive(Debug)]
pub(super) struct Naming {
    model: String,
    /// What the model's template puts before each thing that the user says.
    mark: Option<String>,
}

impl Naming {
    /// Asks a server. Where it does not tell, the model is called like its directory.
    pub(super) fn of(server: &Server, directory: &str) -> Self {
        let properties = server.properties().unwrap_or_default();
        let told =
            properties["model_alias"].as_str().map(file_stem).filter(|name| !name.is_empty());
        let model = slug(told.unwrap_or(directory), MODEL_CHARS_MAX);
        Self { model, mark: user_mark(|messages| server.prompt(messages).ok()) }
    }

    /// The name of a conversation that is saved now; `earlier` is what it was called when it was shorter.
    pub(super) fn name(
        &self, server: &Server, tokens: &[u32], earlier: Option<&str>, now: SystemTime,
    ) -> String {
        let ask = || {
            let text = server.text(&tokens[..tokens.len().min(TITLE_TOKENS_MAX)]);
            title(&text.unwrap_or_default(), self.mark.as_deref())
        };
        let title = earlier.and_then(title_of).map_or_else(ask, str::to_owned);
        let hash = hash(tokens);
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        format!("{title}.{}.{}.{}", time(seconds), self.model, &hash[..HASH_DIGITS])
    }
}

/// `2026-11-26T0650Z`
fn time(seconds: u64) -> String {
    let day = i64::try_from(seconds / DAY_SECONDS).unwrap_or(i64::MAX);
    let (year, month, day) = date_of(day);
    let minute = seconds % DAY_SECONDS / 60;
    format!("{year:04}-{month:02}-{day:02}T{:02}{:02}Z", minute / 60, minute % 60)
}

/// Of a path, or of a name that has none.
fn file_stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.strip_suffix(".gguf").unwrap_or(name)
}

/// The first words that the user says; those of the whole text where it has no mark of a template.
fn title(text: &str, mark: Option<&str>) -> String {
    let said = mark.and_then(|mark| text.split_once(mark)).map_or(text, |(_, said)| said);
    let words = slug(&without_tags(said), TITLE_CHARS_MAX);
    if words.is_empty() { UNTITLED.to_owned() } else { words }
}

/// A text without what stands in angle brackets, as templates have it: `<|im_end|>`, `<s>`.
fn without_tags(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::new();
    while let Some((before, behind)) = rest.split_once('<') {
        kept += before;
        match behind.split_once('>') {
            Some((tag, after)) if !tag.contains([' ', '\n', '<']) => {
                kept.push(' ');
                rest = after;
            }
            _ => {
                kept.push('<');
                rest = behind;
            }
        }
    }
    kept + rest
}

/// Whole words of letters and digits, small, with a dash between each two: legal wherever a name is.
fn slug(text: &str, chars_max: usize) -> String {
    let mut slug = String::new();
    let mut chars = 0;
    for word in text.split(|character: char| !character.is_alphanumeric() && character != '_') {
        let length = word.chars().count() + usize::from(chars > 0);
        if word.is_empty() {
            continue;
        }
        if chars + length > chars_max {
            if chars == 0 {
                slug.extend(
                    word.chars().take(chars_max).flat_map(char::to_lowercase).take(chars_max),
                );
            }
            break;
        }
        if chars > 0 {
            slug.push('-');
        }
        slug.extend(word.chars().flat_map(char::to_lowercase));
        chars += length;
    }
    slug
}

/// What a template puts before each thing that the user says, found by having it write some conversations.
fn user_mark(prompt: impl Fn(&Value) -> Option<String>) -> Option<String> {
    let [system, first, answer, second] = ["kvfs-rule", "kvfs-first", "kvfs-answer", "kvfs-second"];
    let message = |role, content| json!({ "role": role, "content": content });
    let talk = [message("user", first), message("assistant", answer), message("user", second)];
    let alone = prompt(&json!(talk))?;
    let mut heads = vec![alone.split_once(first)?.0, between(&alone, answer, second)?];
    // Some templates have no system message.
    let ruled: Vec<Value> = [&[message("system", system)][..], &talk[..]].concat();
    let ruled = prompt(&json!(ruled)).unwrap_or_default();
    heads.extend(between(&ruled, system, first));
    let shared = heads.into_iter().reduce(common_end)?.trim();
    (!shared.is_empty()).then(|| shared.to_owned())
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let (_, behind) = text.split_once(from)?;
    Some(behind.split_once(to)?.0)
}

/// The longest end that two texts have in common.
fn common_end<'a>(one: &'a str, other: &str) -> &'a str {
    let pairs = one.char_indices().rev().zip(other.chars().rev());
    let same = pairs.take_while(|((_, a), b)| a == b).last();
    same.map_or("", |((start, _), _)| &one[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_called_by_its_tokens() {
        let naming = Naming { model: "tiny".to_owned(), mark: None };
        let server = Server::once(&super::super::tests::nobody()).unwrap();
        let now = UNIX_EPOCH + std::time::Duration::from_secs(1_795_675_800);
        let name =
            |tokens: &[u32]| naming.name(&server, tokens, Some("hello-you.a.b.0123456789ab"), now);
        let first = name(&[1, 2]);
        assert!(first.starts_with("hello-you.2026-11-26T0650Z.tiny."), "{first}");
        assert!(is_of_conversation(&first) && caller(&[1, 2])(&first), "{first}");
        assert!(!caller(&[2, 1])(&first) && name(&[2, 1]) != first);
        assert!(caller(&[1, 2])(&hash(&[1, 2])) && is_of_conversation(&hash(&[1, 2])));
        // Nobody answers, so there are no words.
        let untitled = naming.name(&server, &[1], None, now);
        assert!(untitled.starts_with("untitled."), "{untitled}");
        assert_eq!(title_of(&untitled), None);
    }

    #[test]
    fn names_that_others_gave() {
        for name in
            ["chat", "a.b.c.d", "chat.2026.tiny.0123456789ag", "0123456789ab", "", "a.0123456789ab"]
        {
            assert!(!is_of_conversation(name), "{name}");
        }
    }

    #[test]
    fn titles_are_first_words() {
        fn check(text: &str, mark: Option<&str>, expected: &str) {
            assert_eq!(title(text, mark), expected, "{text:?}");
        }
        check("\u{1}Ruth 1\n\n  1 Now it came to pass", None, "ruth-1-1-now-it-came-to-pass");
        check("Where is /etc/passwd? ../..", None, "where-is-etc-passwd");
        check("", None, UNTITLED);
        check("...\n~~", None, UNTITLED);
        check("<s>[INST] a < b, c > d [/INST]", None, "inst-a-b-c-d-inst");
        let chat = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant";
        check(chat, Some("<|im_start|>user"), "hi-assistant");
        check(chat, Some("[INST]"), "system-be-kind-user-hi-assistant");
        check("Größe über Łódź 北京欢迎你", None, "größe-über-łódź-北京欢迎你");
        check(&"x".repeat(300), None, &"x".repeat(40));
        check(&"word ".repeat(50), None, "word-word-word-word-word-word-word-word");
        // The longest letters that there are fit into a name as well.
        assert!(title(&"𐐀".repeat(300), None).len() <= 160);
    }

    #[test]
    fn marks_of_templates() {
        fn check(write: impl Fn(&str, &str) -> Option<String>, expected: Option<&str>) {
            let prompt = |messages: &Value| {
                let parts = messages.as_array().unwrap().iter().map(|message| {
                    write(message["role"].as_str().unwrap(), message["content"].as_str().unwrap())
                });
                parts.collect::<Option<String>>().map(|text| format!("<s>{text}"))
            };
            assert_eq!(user_mark(prompt).as_deref(), expected);
        }
        check(|role, content| Some(format!("<|{role}|>\n{content}<|end|>\n")), Some("<|user|>"));
        let mistral = |role: &str, content: &str| match role {
            "user" => Some(format!("[INST] {content} [/INST]")),
            "assistant" => Some(format!("{content}</s>")),
            _ => Some(format!("[SYSTEM]{content}[/SYSTEM]")),
        };
        check(mistral, Some("[INST]"));
        let without_system = |role: &str, content: &str| {
            (role != "system").then(|| format!("<start>{role}\n{content}<end>\n"))
        };
        check(without_system, Some("<start>user"));
        check(|_, content| Some(content.to_owned()), None);
        check(|_, _| None, None);
    }
}

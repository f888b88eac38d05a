//! Documents call the program as it is: what their blocks of `sh` say is understood by the parser, and what
//! stands in the text between backticks names commands and options that there are. Nothing is run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Command as Definition, CommandFactory, Error};

use super::*;

/// README, the documents and Python's README.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(root.join("docs")).unwrap();
    let mut found: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.extension().is_some_and(|ending| ending == "md"));
    found.extend([root.join("README.md"), root.join("python/README.md")]);
    found
}

/// What a document has between backticks, and the lines of its `sh` blocks with those behind a `\` joined.
fn split(text: &str) -> (Vec<String>, Vec<String>) {
    let (mut lines, mut spans) = (Vec::new(), Vec::new());
    let mut language = None;
    let mut prose = String::new();
    for line in text.replace("\\\n", " ").lines() {
        match (line.trim_start().strip_prefix("```"), language) {
            (Some(name), None) => language = Some(name == "sh"),
            (Some(_), Some(_)) => language = None,
            (None, Some(true)) => lines.push(line.to_owned()),
            (None, Some(false)) => {}
            (None, None) => prose.extend([line, "\n"]),
        }
    }
    spans.extend(prose.split('`').skip(1).step_by(2).map(str::to_owned));
    (lines, spans)
}

/// The words of a line as a shell reads them, with `&&`, `;` and `|` as words of their own, and the comment behind
/// them.
fn words(line: &str) -> (Vec<String>, String) {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => return (words, characters.collect()),
            (None, _) if character.is_whitespace() => words.extend(word.take()),
            (None, ';') => words.extend(word.take().into_iter().chain([";".to_owned()])),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    (words, String::new())
}

/// `a|b` and `[a|b]` stand for one of them, `[a]` for something that may be left out, `...` for more of the same.
fn alternatives(words: &[String]) -> Vec<Vec<String>> {
    let mut found = vec![Vec::new()];
    for word in words.iter().map(|word| word.trim_start_matches('[').trim_end_matches(']')) {
        let word = word.trim_end_matches("...");
        if !word.is_empty() {
            let with = |choice: &str| {
                let longer =
                    found.iter().map(|words| [words.as_slice(), &[choice.to_owned()]].concat());
                longer.collect::<Vec<_>>()
            };
            found = word.split('|').flat_map(with).collect();
        }
    }
    found
}

/// Calls of the program in the words of a line.
fn calls(words: &[String]) -> impl Iterator<Item = &[String]> {
    let commands = words.split(|word| ["&&", "||", ";", "|"].contains(&word.as_str()));
    commands.filter_map(|command| {
        let is_argument = |word: &String| !word.contains('=') && word != "sudo";
        let first = command.iter().position(is_argument)?;
        let calls_it = command.windows(2).position(|pair| {
            pair[0] == "kvfs" && Arguments::command().find_subcommand(&pair[1]).is_some()
        });
        // One that calls another program with it is known by the command behind it.
        let at = if command[first] == "kvfs" { first } else { calls_it? };
        Some(&command[at..])
    })
}

fn parse(words: &[String]) -> Result<(), Error> {
    match Arguments::try_parse_from(words) {
        Err(error) if !matches!(error.kind(), ErrorKind::DisplayHelp) => Err(error),
        _ => Ok(()),
    }
}

/// Whether a call in the text may be as it is: a mention need not be complete, and names in capitals are places
/// for values.
fn is_mention(words: &[String]) -> bool {
    use clap::error::{ContextKind, ContextValue};
    let Err(error) = parse(words) else { return true };
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.as_str(),
        _ => "",
    };
    match error.kind() {
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::TooFewValues
        | ErrorKind::WrongNumberOfValues => true,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            !value.contains(|character: char| character.is_ascii_lowercase())
        }
        _ => false,
    }
}

fn options(definition: &Definition, found: &mut BTreeSet<String>) {
    let own = definition.get_arguments().filter_map(clap::Arg::get_long);
    found.extend(own.map(|name| format!("--{name}")));
    definition.get_subcommands().for_each(|command| options(command, found));
}

#[test]
fn documents_call_the_program_as_it_is() {
    let mut known = BTreeSet::from(["--help".to_owned()]);
    options(&Arguments::command(), &mut known);
    let (mut checked, mut wrong) = ([0; 3], Vec::new());
    for path in documents() {
        let (lines, spans) = split(&std::fs::read_to_string(&path).unwrap());
        for line in lines {
            let (line, comment) = words(&line);
            for call in calls(&line).flat_map(alternatives) {
                wrong
                    .extend(parse(&call).err().map(|error| format!("{}: {error}", path.display())));
                checked[0] += 1;
                // What else the command can do stands in the comment.
                let named = comment.split(|character: char| !is_of_option(character));
                for option in named.filter(|word| word.starts_with("--")) {
                    let is_there = known.contains(option);
                    wrong.extend((!is_there).then(|| format!("{}: {option}", path.display())));
                    checked[1] += 1;
                }
            }
        }
        for span in spans.iter().filter(|span| span.starts_with("kvfs ")) {
            // The first lines of files begin with the name as well.
            if !span.contains("::") && !span.starts_with("kvfs uses ") {
                let (words, _) = words(span);
                for call in alternatives(&words).iter().filter(|call| !is_mention(call)) {
                    wrong.push(format!("{}: {call:?}", path.display()));
                }
                checked[2] += 1;
            }
        }
    }
    assert_eq!(wrong, [""; 0]);
    let is_enough = checked.iter().zip([60, 10, 150]).all(|(count, least)| *count >= least);
    assert!(is_enough, "only {checked:?} calls, options in comments and mentions were found");
}

fn is_of_option(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

#[test]
fn calls_that_are_not_understood_are_found() {
    fn check(line: &str, call: bool, mention: bool) {
        let (words, _) = words(line);
        let found: Vec<_> = calls(&words).flat_map(alternatives).collect();
        assert!(!found.is_empty(), "{line}");
        assert_eq!(found.iter().all(|call| parse(call).is_ok()), call, "{line}");
        assert_eq!(found.iter().all(|call| is_mention(call)), mention, "{line}");
    }
    check("mkdir -p x && kvfs mount s m   # no comment --at-all", true, true);
    check("A=1 kvfs gc MOUNTPOINT [--dry-run|--yes]", true, true);
    check("podman run image kvfs mount --foreground s m", true, true);
    check("kvfs mount --remote-key-command 'a b' s m", true, true);
    check("kvfs gc --forget-store ID MOUNTPOINT", false, true);
    check("kvfs create --from", false, true);
    check("kvfs create --fron FILE", false, false);
    check("kvfs seq rm|copy", false, false);
    check("kvfs monut STORE MOUNTPOINT", false, false);
    check("kvfs mount --ram lots STORE MOUNTPOINT", false, false);
    let (words, comment) = words("a 'b # c';\nd # e");
    assert_eq!((words.join(","), comment.as_str()), ("a,b # c,;,d".to_owned(), " e"));
}

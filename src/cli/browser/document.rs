//! The document: one file, with nothing from elsewhere, that is readable as text where no script runs.

use crate::cli::markup::escaped;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The document of a mount, with what is known of it as text.
pub(super) fn filled(nonce: &str, mountpoint: &str, text: &str) -> String {
    fill(TEMPLATE, |name| match name {
        "nonce" => nonce.to_owned(),
        "style" => STYLE.to_owned(),
        "script" => SCRIPT.to_owned(),
        "mountpoint" => escaped(&crate::page::printable(mountpoint.chars())),
        "text" => escaped(text),
        _ => String::new(),
    })
}

/// Puts values in the place of `{{NAME}}`; what is in a value stays as it is.
fn fill(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut filled = String::new();
    let mut rest = template;
    while let Some((before, (name, behind))) =
        rest.split_once("{{").and_then(|(before, rest)| Some((before, rest.split_once("}}")?)))
    {
        filled.push_str(before);
        filled.push_str(&value(name));
        rest = behind;
    }
    filled + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_not_filled_again() {
        let value = |name: &str| if name == "a" { "{{b}}" } else { "wrong" }.to_owned();
        assert_eq!(fill("x{{a}}y{{", value), "x{{b}}y{{");
    }

    #[test]
    fn the_document_is_whole_and_loads_nothing() {
        let document = filled("0123", "/<m>", "</pre><script>alert(1)</script>{{nonce}}");
        assert!(document.contains("&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;{{nonce}}"));
        assert!(document.contains("/&lt;m&gt;"));
        assert_eq!(document.matches("nonce=\"0123\"").count(), 2);
        assert_eq!(document.matches("<script").count(), 1);
        for loading in ["src=", "@import", "url(", "http://", "https://", "innerHTML", "eval("] {
            // The name of the namespace of pictures is asked for by nobody.
            let found = document.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(loading), "{loading}");
        }
    }
}

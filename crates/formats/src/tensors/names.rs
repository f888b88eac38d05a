//! Which layer's K or V a tensor is, by its name.

/// What a tensor is of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    K,
    V,
    /// How many of the tokens that K and V have room for are there; MLX-LM tells.
    Length,
}

/// Layer and part of what is called as those name it who keep caches in such files: `layers.3.keys`
/// (`DynamicCache`), `key_cache.3` (`DynamicCache` before 4.54), `past_key_values.3.key` (exported models),
/// `3.0`, `3.1` and `3.2` (MLX-LM's prompt caches), and any other name of a number and a word for K or V.
pub(super) fn parse(name: &str) -> Option<(u32, Part)> {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    if let [layer, part @ ("0" | "1" | "2")] = words[..]
        && let Ok(layer) = layer.parse()
    {
        let part = match part {
            "0" => Part::K,
            "1" => Part::V,
            _ => Part::Length,
        };
        return Some((layer, part));
    }
    let mut numbers = words.iter().enumerate();
    let (at, layer) = numbers.find_map(|(at, word)| Some((at, word.parse().ok()?)))?;
    // In `past_key_values.3.key` the word behind the number counts.
    let behind = words[at + 1..].iter().find_map(|word| part(word));
    let part = behind.or_else(|| words[..at].iter().rev().find_map(|word| part(word)))?;
    Some((layer, part))
}

fn part(word: &str) -> Option<Part> {
    match word.to_ascii_lowercase().as_str() {
        "k" | "key" | "keys" => Some(Part::K),
        "v" | "value" | "values" => Some(Part::V),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_use() {
        fn check(name: &str, expected: Option<(u32, Part)>) {
            assert_eq!(parse(name), expected, "{name}");
        }
        check("layers.3.keys", Some((3, Part::K)));
        check("layers.3.values", Some((3, Part::V)));
        check("key_cache.12", Some((12, Part::K)));
        check("value_cache.12", Some((12, Part::V)));
        check("past_key_values.0.key", Some((0, Part::K)));
        check("past_key_values.0.value", Some((0, Part::V)));
        check("layer_7_k", Some((7, Part::K)));
        check("V_7", Some((7, Part::V)));
        check("5.0", Some((5, Part::K)));
        check("5.1", Some((5, Part::V)));
        check("5.2", Some((5, Part::Length)));
        check("5.3", None);
        check("5.0.0", None);
        check("input_ids", None);
        check("layers.3.scale", None);
        check("keys", None);
        check("", None);
        check("99999999999.keys", None);
    }
}

//! The first tokens and the last ones (`StreamingLLM`, Xiao et al. 2023).

use super::TokenSet;

/// The first `sinks` and the last `window` of `tokens`.
pub fn sinks_and_window(tokens: usize, sinks: usize, window: usize) -> TokenSet {
    let mut set = TokenSet::none(tokens);
    set.insert(0..sinks);
    set.insert(tokens.saturating_sub(window)..tokens);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens() {
        fn check(tokens: usize, sinks: usize, window: usize, expected: &[usize]) {
            let set = sinks_and_window(tokens, sinks, window);
            let found: Vec<usize> = (0..tokens).filter(|token| set.contains(*token)).collect();
            assert_eq!(found, expected);
        }
        check(10, 2, 3, &[0, 1, 7, 8, 9]);
        check(4, 2, 3, &[0, 1, 2, 3]);
        check(2, 4, 8, &[0, 1]);
        check(0, 4, 8, &[]);
    }
}

//! The choice of the next token.

/// The token with the highest logit; the lowest id among equals, so that the choice is the same
/// in every run.
pub(crate) fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, highest)| logit > highest) {
            best = Some((id, logit));
        }
    }
    best.and_then(|(id, _)| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use super::greedy;

    #[test]
    fn takes_the_highest_and_the_first_of_equals() {
        assert_eq!(greedy(&[0.5, 2.0, -1.0, 2.0]), Some(1));
        assert_eq!(greedy(&[f32::NEG_INFINITY; 3]), Some(0));
        assert_eq!(greedy(&[]), None);
    }
}

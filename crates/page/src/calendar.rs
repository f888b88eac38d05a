//! Days of the calendar, for times that people read; everything else counts seconds.

/// Year, month and day of a day since 1970. Years are counted from March, so that a leap day ends one.
pub fn date_of(day: i64) -> (i64, i64, i64) {
    const DAYS_OF_400_YEARS: i64 = 146_097;
    let since_march_of_0 = day.saturating_add(719_468);
    let era = since_march_of_0.div_euclid(DAYS_OF_400_YEARS);
    let day = since_march_of_0.rem_euclid(DAYS_OF_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day_of_month = day - (153 * month + 2) / 5 + 1;
    let (month, carried) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + carried, month, day_of_month)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_the_dates_of_the_calendar() {
        for (day, expected) in [
            (0, (1970, 1, 1)),
            (-1, (1969, 12, 31)),
            (11_015, (2000, 2, 28)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_087, (2024, 12, 30)),
            (20_088, (2024, 12, 31)),
            (20_089, (2025, 1, 1)),
        ] {
            assert_eq!(date_of(day), expected, "{day}");
        }
    }
}

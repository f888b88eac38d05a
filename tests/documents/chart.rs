//! `docs/what-it-saves.svg` draws the table below it in README: the same figures, where its axis has them.

use super::{Path, document};

/// Where the axis has 5 ms, and how much further ten times as much is.
const AXIS: (f64, f64) = (40.0, 224.0);
const AXIS_BEGINS_MS: f64 = 5.0;

/// Rows of the first table: what, computed, restored, times.
fn table(readme: &str) -> Vec<[String; 4]> {
    let rows =
        readme.lines().skip_while(|line| !line.starts_with("| | computed | restored | times |"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.split('|').skip(1).map(|cell| cell.trim().to_owned()));
    cells.map(|mut cells| std::array::from_fn(|_| cells.next().unwrap())).collect()
}

fn milliseconds(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap();
    number.parse::<f64>().unwrap() * f64::from([1, 1000][usize::from(unit == "s")])
}

/// Where a time stands on the axis, as the picture writes it.
fn place(time: &str) -> String {
    let tenfold = (milliseconds(time) / AXIS_BEGINS_MS).log10();
    format!("{:.0}", AXIS.1.mul_add(tenfold, AXIS.0))
}

/// `a UNIT` and `b UNIT` as one range.
fn range(least: &str, most: &str) -> String {
    format!("{} to {most}", least.split(' ').next().unwrap())
}

/// What the picture has to have for the rows of the table, of which two are the least and the most of one.
fn drawn(rows: &[[String; 4]]) -> Vec<String> {
    let mut parts = Vec::new();
    let [single @ .., [what, least @ ..], [_, most @ ..]] = rows else { panic!("{rows:?}") };
    for [what, computed, restored, times] in single {
        parts.extend([format!(">{what}<"), format!(">{times} times<")]);
        for (class, time) in [("computed", computed), ("restored", restored)] {
            parts.push(format!("<circle class=\"{class}\" cx=\"{}\"", place(time)));
            parts.push(format!(">{time}<"));
        }
    }
    let what = what.split_once(": the least of ").unwrap().0.replace('`', "");
    parts.extend([format!(">{what} ("), format!(">{} times<", range(&least[2], &most[2]))]);
    for (class, part) in [("computed", 0), ("restored", 1)] {
        let (from, to) = (place(&least[part]), place(&most[part]));
        let width: i32 = to.parse::<i32>().unwrap() - from.parse::<i32>().unwrap();
        parts.push(format!("<rect class=\"{class}\" x=\"{from}\""));
        parts.push(format!("width=\"{width}\""));
        parts.push(format!(">{}<", range(&least[part], &most[part])));
    }
    parts
}

#[test]
fn the_chart_draws_the_table_of_the_readme() {
    let readme =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut rows = table(&readme);
    let picture = document("what-it-saves.svg");
    let lacks = |rows: &[[String; 4]]| {
        let parts = drawn(rows).into_iter().filter(|part| !picture.contains(part.as_str()));
        parts.collect::<Vec<_>>()
    };
    assert_eq!(rows.len(), 4);
    assert_eq!(lacks(&rows), [""; 0]);
    rows[0][1] = "2252 ms".to_owned();
    rows[3][2] = "80 ms".to_owned();
    assert_eq!(lacks(&rows), [">2252 ms<", "width=\"78\"", ">36 to 80 ms<"]);
}

//! Hits against room, as an image in SVG.

use std::fmt::Write;

use super::Room;
use super::policies::{KVFS, OPTIMUM};
use super::read::Trace;
use super::report::found;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
/// Around the lines; the names of the policies stand on the right.
const LEFT: f64 = 60.0;
const RIGHT: f64 = 140.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// Told apart in print and by most eyes.
const COLOURS: [&str; 9] = [
    "#d62728", "#1f77b4", "#7f7f7f", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf",
    "#000000",
];

/// One image below the other for each trace.
pub(super) fn draw(replayed: &[(Trace, Vec<Room>)]) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a handful of traces")]
    let height = HEIGHT * replayed.len() as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut top = 0.0;
    for (trace, rooms) in replayed {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "<g transform=\"translate(0 {top})\">");
        draw_trace(&mut text, &trace.name, rooms);
        text.push_str("</g>\n");
        top += HEIGHT;
    }
    text.push_str("</svg>\n");
    text
}

fn draw_trace(text: &mut String, name: &str, rooms: &[Room]) {
    let shares: Vec<f64> = rooms.iter().map(|room| room.share).collect();
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    let most = shares.iter().copied().fold(0.0, f64::max);
    // Rooms are far apart: their logarithms are drawn.
    let across = |share: f64| {
        let part = if most > least { (share / least).ln() / (most / least).ln() } else { 0.5 };
        LEFT + part * (WIDTH - LEFT - RIGHT)
    };
    let down = |share: f64| TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM);
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let _ = writeln!(text, "<text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>", escape(name));
    for step in [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] {
        let y = down(step);
        let _ = writeln!(
            text,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{step:.1}</text>",
            LEFT - 6.0,
            y + 4.0
        );
    }
    for share in &shares {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{share:.0} %</text>",
            across(*share),
            bottom + 18.0
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"{:.1}\">found of repeated blocks, against room in per cent of the \
         different blocks</text>",
        bottom + 38.0
    );
    let policies = rooms.first().map_or(0, |room| room.outcomes.len());
    let mut label = TOP + 8.0;
    for (policy, colour) in (0..policies).zip(COLOURS.iter().cycle()) {
        let name = rooms[0].outcomes[policy].policy;
        let width = if name == KVFS { 3.0 } else { 1.5 };
        let dashes = if name == OPTIMUM { " stroke-dasharray=\"5 4\"" } else { "" };
        let points: Vec<String> = rooms
            .iter()
            .map(|room| {
                let y = down(found(&room.outcomes[policy]));
                format!("{:.1},{y:.1}", across(room.share))
            })
            .collect();
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}/>\
             <text x=\"{:.1}\" y=\"{label:.1}\" fill=\"{colour}\">{name}</text>",
            points.join(" "),
            right + 12.0
        );
        label += 18.0;
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::super::read::trace_of;
    use super::super::replay::Outcome;
    use super::*;

    #[test]
    fn every_policy_is_drawn_and_named() {
        let outcomes = |found| {
            vec![KVFS, "LRU", OPTIMUM]
                .into_iter()
                .map(|policy| Outcome { policy, repeated: 10, found, ..Outcome::default() })
                .collect()
        };
        let room = |share, found| Room { share, blocks: 1, outcomes: outcomes(found) };
        let image = draw(&[(trace_of(&[&[1]]), vec![room(1.0, 0), room(10.0, 10)])]);
        assert_eq!(image.matches("<polyline").count(), 3);
        assert_eq!(image.matches("points=\"60.0,350.0 500.0,40.0\"").count(), 3, "{image}");
        for name in [KVFS, "LRU", OPTIMUM, ">1 %<", ">10 %<"] {
            assert!(image.contains(name), "{name}");
        }
    }
}

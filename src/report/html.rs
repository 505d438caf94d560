//! Escapes text for an HTML page.

use std::fmt::Write as _;

/// The escaped text; special tokens, such as `<|im_end|>`, are in elements of their own.
pub(crate) fn with_specials(text: &str) -> String {
    let mut html = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(start) = rest.find("<|") {
        let Some(end) = rest[start..].find("|>").map(|end| start + end + 2) else { break };
        push(
            &mut html,
            format_args!(
                "{}<span class=\"sp\">{}</span>",
                escaped(&rest[..start]),
                escaped(&rest[start..end])
            ),
        );
        rest = &rest[end..];
    }
    html.push_str(&escaped(rest));
    html
}

/// Escapes text for elements and attributes.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // Control characters are not allowed in HTML; the others reverse the direction of text.
            c if c.is_control()
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                push(&mut out, format_args!("\\u{{{:x}}}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out
}

/// Appends formatted text.
pub(crate) fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text); // writing to a String cannot fail
}

/// An HTML document. The browser must not load or run anything, even if escaping failed.
pub(crate) fn document(title: &str, style: &str, body: &str) -> String {
    let policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_never_becomes_markup() {
        let nasty = "<script>alert('1')</script> & \"x\" <|im_end|> <| \u{202e}\u{0}";
        let html = with_specials(nasty);
        assert_eq!(
            html,
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &quot;x&quot; \
             <span class=\"sp\">&lt;|im_end|&gt;</span> &lt;| \\u{202e}\\u{0}"
        );
    }
}

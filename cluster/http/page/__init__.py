"""The page at `/`: a chat that shows the origin of each token, races answers with and without drafts, and shows the
state of the engines. Static files, no build step; libraries as published, in `vendor` (versions and licences there).

files  the files as routes, with their content security policy

page.html, page.css and icon.svg are the layout. page.js joins the other scripts:

- api.js: HTTP requests, with the API key if the server needs one; the served model
- turns.js: a question, which can be edited, with its answer or its race
- answer.js: one answer: text, tokens by origin, reasoning, figures, how it ended
- race.js: the same prompt with and without drafts; replay
- markdown.js: Markdown as DOM nodes, from marked's tokens
- formulas.js: formulas, found before marked reads the text, shown by KaTeX
- colours.js: colours of code, by highlight.js
- conversations.js: the history, stored in the browser; search
- sidebar.js, export.js: the list of conversations; conversations as files
- toast.js: a line with what has happened, and its undoing
- settings.js: sampling, thinking, system prompt, view, style
- engines.js: the state of the engines, live
- figures.js: calculations that need no browser
- element.js: DOM nodes shared by the scripts
"""

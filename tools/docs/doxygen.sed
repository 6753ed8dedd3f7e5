# Doxygen's pages are the front page, tools/docs and the API. It finds pictures by their names; links to other files become text.
s#(!\[[^][]*\]\()[^)]*/([^/)]*\.png\))#\1\2#g
s#(^|[^!])\[([^][]*)\]\((\.\./|tools/(examples|python|bench)/|tests/|\.github/|LICENSE)[^)]*\)#\1\2#g

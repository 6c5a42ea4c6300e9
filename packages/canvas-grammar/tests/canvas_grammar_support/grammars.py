"""Grammars as clients write them, in both notations."""

from __future__ import annotations

LARK: dict[str, str] = {
    "arith": """?start: sum
?sum: product | sum "+" product -> add | sum "-" product -> sub
?product: atom | product "*" atom | product "/" atom
?atom: NUMBER | "-" atom | NAME | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
""",
    "json": """?start: value
?value: object | array | string | SIGNED_NUMBER -> number | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: string ":" value
string: ESCAPED_STRING
%import common.ESCAPED_STRING
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
""",
    "sql": """start: select_statement
select_statement: "SELECT" column_list "FROM" table_name where_clause?
column_list: column_name ("," column_name)*
table_name: IDENTIFIER
column_name: IDENTIFIER
where_clause: "WHERE" condition ("AND" condition)*
condition: column_name OP value
OP: "=" | "<=" | "<" | ">"
value: INT | "'" /[^']+/ "'"
IDENTIFIER: /[a-zA-Z_][a-zA-Z0-9_]*/
%import common.INT
%import common.WS
%ignore WS
""",
    "config": """start: (pair _NL)+
pair: KEY "=" VALUE
KEY: /[a-z]+/
VALUE: /[^\\n=]+/
_NL: /\\n/
""",
    "turtle": """start: instruction+
instruction: MOVEMENT NUMBER -> movement
    | "c" COLOR [COLOR] -> change_color
    | "fill" code_block -> fill
    | "repeat" NUMBER code_block -> repeat
code_block: "{" instruction+ "}"
MOVEMENT: "f"|"b"|"l"|"r"
COLOR: LETTER+
%import common.LETTER
%import common.INT -> NUMBER
%import common.WS
%ignore WS
""",
    "calls": """start: call (";" call)*
call: NAME "(" [arg ("," arg)*] ")"
arg: NAME "=" expr | expr
expr: call | STRING | INT | "[" [expr ("," expr)*] "]"
STRING: /"[^"\\n]*"/
NAME: /[a-z_]+/
%import common.INT
""",
    "comments": """start: (word | COMMENT)+
word: /[a-z]+/ ";"
COMMENT: "/*" /(.|\\n)*?/ "*/"
""",
    "numbers": """start: INT+
%import common.INT
%import common.WS
%ignore WS
""",
    "nospace": """start: "let" NAME "=" NAME
NAME: /[a-z]+/
%ignore " "
""",
    "keyword": """start: "if" NAME "then" NAME | NAME
NAME: /[a-z]+/
%import common.WS
%ignore WS
""",
    "ignored_case": """start: row~2..4
row: cell ("," cell)* "\\n"
cell: /[0-9]+/ | /[a-z]+/i
""",
    "templates": """start: _sep{item, ","}
_sep{x, s}: x (s x)*
item: "a".."f" | "(" start ")"
""",
    "first_option": """start: A "c"
A: /a|ab/
""",
}
GBNF: dict[str, str] = {
    "arith": """root ::= expr
expr ::= term ("+" term | "-" term)*
term ::= f | term [*/] f
f ::= [0-9]+ | "(" expr ")"
""",
    "json": r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= "" | " " | "\n" [ \t]{0,20}
""",
    "vllm_sql": """root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
""",
    "list": 'root ::= ("- " [^\\n]+ "\\n"){1,3}  # x ::= y\n',
    "chess": r"""root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
""",
    "dangling": 'root ::= s\ns ::= "i" s | "i" s "e" s | "p"',
    "hidden": 'root ::= m root "x" | "y"\nm ::= k | ""\nk::= "(" k ")" | ""',
    "mutual": 'root ::= a\na ::= b "x" | "1"\nb ::= a "y" | b "z" | "2" a',
    "unicode": r'root ::= "é\u4e2d\U0001F600\x41" [^\x00-\x7f]{2} [à-ÿ日]? [\]\-^a-c-]* "\t\"\\"',
}

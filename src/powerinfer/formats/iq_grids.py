"""The grids of the IQ types: vectors of 4 or 8 small numbers, which blocks refer to by their place.

The tables of ggml, as codes of their values: 2 bits each (IQ3: 4), element by element of all vectors, compressed.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import cache

import numpy as np
from numpy.typing import NDArray

_BY_2, _BY_3 = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
_GRIDS = {  # vectors, their elements, the values of codes; in the order of _DATA
    "IQ2_XXS": (256, 8, _BY_2),
    "IQ2_XS": (512, 8, _BY_2),
    "IQ2_S": (1024, 8, _BY_2),
    "IQ1": (2048, 8, (-1, 0, 1)),
    "IQ3_XXS": (256, 4, _BY_3),
    "IQ3_S": (512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
}


@cache
def _codes() -> dict[str, NDArray[np.uint8]]:
    """The codes of each grid, uint8 [elements, vectors]."""
    data, codes = np.frombuffer(zlib.decompress(b85decode("".join(_DATA.split()))), np.uint8), {}
    for name, (vectors, elements, values) in _GRIDS.items():
        bits = 2 if len(values) < 4 else 4
        packed, data = np.split(data, [vectors * elements * bits // 8])
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes[name] = (packed[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(elements, vectors)
    return codes


@cache
def grid(name: str) -> NDArray[np.float32]:
    """The grid of that name, float32 [vectors, elements]."""
    values: NDArray[np.float32] = np.array(_GRIDS[name][2], np.float32)
    return np.ascontiguousarray(values[_codes()[name].T])


_DATA = """
c-qZa&2!qwwr|PeLt04+5RsL{NFKw=*e~<8Em_teR*fS0*;xSr%D$^NlQ`Le3n(%xaG_K@E9MqT4g8hww1jOEPbQgrU*^42WlNmz?mm6`*HY4Lyh
t;@n<}R&DU4OsL`;@RwXwa|YW6wAFfz_%v4y8hO8w1b5I3Cc5>Xv+(_zj-Q+ZDth%>|u#DShY-W`~nsMWN$BEvQNtSNfKp^3QNE6&UgvQD2H4|I;
PSc$Nb$uZL!npftmWvWxwVoOq1&*5opFzQ<}*F;yyZYo6Jf5Uo>=XB2K=WTvCCkRP7OSRkmA(ul42P<~jNB)YPTLKO_6tM=QGt(w6Gi2UGB(jA30
+Bi2zpijOVxzRq;aLvpX+swgB|lil|5pM+5xj&fE~609e|;*5D#$>AfP71sqKGiqKz@bCyp1iip&+Jcy<R5{L;8Y)*fD*9-vadnzXP5MLIE;EOZ0
$(TUy6-FCe#E;qK?Q_%jqdq-cFl%D6RbagMEw2a?$2Ol2%78smtzdetIGA$=-s_9d>FZE})`Qdgap!ihL*P9s(8Q}uL8F>yNW*oc{kqRcrMi&rK=
lHF#`7unfcWx%wvsqDZMt&$+C6G?oRDtRS#l<mKtdX{I&I&UmFw}xfA#=FxTr<+LP%92*=Hwj2J#ualZEbAtgNzST^xY-|~_TJlU9n@uM%9&zT=S
_QJ60CqaaL^<>u(+Adjq=kWx0lNHxxu`BHE;>>_HcUdYQRS7$uG2S{4zFhAP|9p+JZ$1Ma=U$EPqa5&Z)G_5i2LMbIh7pYO=)24klAP>;I-v^|^%
%&f>9QPdUz%c~H;wrxR3ZFyh-<ZgPzxaZemAh}OIsWO?Zvb!U42Ia?~O*<UxsQlaY^v9!ow#VUvx7^)-`mVK5M50qX7Gf+7kq{t#)@E53Yg)XjQ^
%cSqE5bj-r+hPoU^FunE%f;uM^o&=ehDi$wMKKDSuKP)u}1GCbjqIZ_W!xqR0)m?W3{O*TAuM63D)eU)<XJ5AjOc4`7m(^uY}tgTUF>Yf<%pYOTv
!|Y$3EFsa5QeRz8@5MaUAqjL538hx`ZiOFpeq_D<w)Qe<yq-fe~Z5r9$URvd3Z6bHV`GTDVeM3r#3{)+wMKiEF2t?eT`G{9S`pKjs10fx5@(7#6{
_zGJ83B~&#_IMFCa?5TGB*oDwOBs)(K}(T<Z7P!4mz;5nYc*}ooaDw*8*HFAkEvK{5DrWgr^&UHfyCKjQ;{4|F{gc{)oH5fLV??3WruS_(NviR_h
bo{+PHNp4y5r2+KZ@&=Ej*x-K3$PNbrQNqx7XD2$f;Zq}>SG6f<aY1C9(8lPYlv{7ppeiDM6>;~{9<jyRTL#k46Y`ag!y(Fm8GfJ0nUXVde=@}D(
KN~No~|3C+Fp^?mW6Pl3QA;75fjccxKP&Q}GIL38B$uKP${RS<{1RLFi<^y6|mLxDWbW@&BIakz8)!=n=%4sI`*pgvJCgZv*Q=Y`hQe7__%iMA<&
N!EESd>5GHqJQeMuvW-!xOrmjoc&%m6`I8c0*`_oQ>t7*z_PcC@BzC+_QC7cR607+BMmP4n`Ga%f>^NFY2Z!$)IPeIjJ<&2E)C|K&zL3kNY1SodP
tnpyERlB$zT_r~7c4QnrB^gQLI8y3fz;Rf@i^SlGr96{qHw38pw?=g_{0g?SCr?qw`(>d~?cVlCt>DPx|21J^XOBNjt*h@(-jm=9P3CC&`$2Kwoc
KB4P!%q9qxaq}sn>dai6qB+4L8wga%)*)(>E0%CXj2zYGa~$oUporNNf3DFVCPW5@GgY^k@-kadIq$sxOR~dP>$s89rkAw5TORB$XefRdca0GGGB
jv@BW4q^KszDb^{X{ytPm;Fb_eZ+B;bU0!?{3tEDkZ_3)%90i}mA&AF{WxC=8*k9G<`zxZ5Czo&o_IyMe|EhXFfa<9vJp;0POLb)70z;x>#^8%35
Q{BfKR>oYv)E_2vpag^#;rdE?(e9}mw?UuXYg?D`p#~Q-NoiV!aVw-MLx$Vz)Y8wae3eHJXc^H)4Zk`*DAdZAB&1j>RxS^H1QHp0x0JwJRA-apV5
^m!q@Qy&``Cu18mUFyXe_hM}2r>y@0$G35+{yOoQTcMr&jj;7I)vEmBPaUEE!oceqxlXucKB|dzr~sJrw32ve<|4NE8XJH+oAsp!ofG8aQ)XwDYR
P?&3oVN)!=zDJk`d5moGYUah!LYfq61i+Qs(dIF}!dly;zuYqn{R@?*(xozr1!e0u844W}pC&dsc)+;p7r(B3WFysw>l_PSAUYNt}qwRg{)cav5p
nzT;yZKYt0X06fa^yGBXniZe>fjyUotyYjLL7>Ux_+~VcO6{|W_O7dVa<5%*dP=*~y2%BjS+S>tMW9*k#_o*st)ba-+*a2a=1<CYZMXQLC+`;I<D
O%8T4tf>>W*{W=@g1Lz4x=TQ)}icH}<ugb_zEg{bn}PXS%BwjajbvHYd5Bd#x9{*OA+?$FpGvBAtOs@htC}*T+Wj!`o5nZR_lP6rBC?uG_KBJ`~5
Zw~bmm_iiSgb$T}txuwhRYm1X!K0Rv4#d0CEhx5f`A{E+`QNAU^kTpje*BXxhp<(yh%J^(Hzu?=Ge7-#?7RE&wb)hsq_0Hap@{Z!zz4Kvy)H*$_O
=k93KCX4bIHOsot>g;b!nOP^eD9qp<Dug8p1eP6*~eh5fWHrU=e+c`tBp^YmRlU3b&5BQ=fCsyLa7AcO9?vT$wX^Urt-PJ7!;zJ-i7CwuU~nsf)m
y)V>$J1IKId~InSLhW+~fCKRK^W)54kUc>qUti7Pc`%Y6Q<KKI<+$h-EfdMfnzh?MQ1PU_`o*En{CZccA_<+6SeSl6?K`9waSI?e}w_8a%4SYL#}
b-^9$Mmd@fT21YI(O4|5jfPX$JMSz8j$1cOw|wJW)J^P9FJ>S7>9v@34cGANh7o?~lzD!xpZT4d=M)X&*fQp>dv?=nz(R&M{7pTYd%Rx>ZNt@PzB
fJb>-C7N$Xn0lLma`W$%aB$FM~Hon3N+nth*~c3iS`ZFq&rFE~wNEH|lyH=GUdjFGTa4VeWRJh=`k;>q}n<2_$%886k{8DVM|RX*4hDW2s?5o{oF
H>|QJuW)X(wSQj_l#o&67{?)#I+p)ZhveD@*mmTGNVeg(Vj*od4<jx@d<f5}~!027#9(&G-)iaLAaOs=Zgm4*W#D`X0zp-wX{+UBgI>wSrJ=dN3q
22&%<9y*>Tzk{Kf6fN!f7s>7=*XdK6kWrx-NBW2m3}Vk?qUH8i{_OOt*n3z>C+R)>cqO>3Gat%fAyS1_0+Ut;I&_mPWWjhLd)kce<uLRtRR}7umM
b5gnan5V&Qxx^o$K+)JVcLbre;)A?t_rurBy3AFb+TyoM!N`)mZJ@bKMeiNkuZ_N__|ujdF}R$jRur{hKMSP}|=zhDvly2rx758guo@Jt186$Pk4
g;YYa@&G!5;+jNH$OTJQaG?j}2>Jy2B3OiMP!4zsC@7rrlP62>g6r5DO}IjT!Uc5=xCveW&4%%1kpvbUo)vg*u-5U)3Wewd8(oTGBNoQ%GY}aE>n
TkN1#2VpzyhK!pECiBWbM;Agh>@(R4456Ia#IXv;b-j0SJQ-;PINkbj@MZ%(7046MhK+%r;C{*&uw95WRTE8Lb2e8=<hy2jvh`HpuI2=!110eC7R
efLA`d{1pa<LksZHafCxJVt+pYm2&tTtwE0-M(cPUVAS;c)S9JeH~F|E!~l%mlTo~~I0kYts7gRsa+AKhmXi(M5E4YRs?hHSbW-UglNb;Z3O`7K1
F2s+|0uQs5KMi=yj3Mh3*Hj96x>h<dk@Ql<n|tanW&)T14NQ_J)mg%76kgi27e|<`wmG8_i*YCBH?>H>u>Du5K{vA3H>+|C(Y84;oENt{sy(;<Vj
)w#ziu*K{AK&#|VE#CpNaB+#td18-<M=C77Qw;tH-L#sa#_D88!Dfsr@>3O3PhCl)7h<5<C_&QWr0p#kU(1%<cx$KQf$>^<m;?f~dL1{StZ*+*E`
e~6YVTVN-;M_c|q2HQf<>#a{W8z{qWxef2|E_nbjD<6TX=nfc@Pg4>;3oJjzP7ice_aCG19jEfZ*OtBiVAxwK!oAHFaQ#Srudy}D<l&V>*uH<<-=
seF<!@QA_aBe{5dZq0zxn*p?FauAK>D>8r}d}b{yuv#`{Ow5zj<}}99m|-a_C<gHu*yS!q?vzqA!h|{OP6X8{Yo@;+M!TPWN9R|Jz)!KD}^$E&Z*
Ny!y7O{hjo!mhtbV_5WW|b1zlxSygSQCbAg$<xlyHxBugR=D+v2&ZDYYRbL?){xdAwDx`41K=MvotES}rjQW$B$z%NVrCB{;<Q+p5J5^Gu{x`dO{
KL+x%a>fH`CmDIC&kLBcU(Hy|6aycC-)QQ7>CtMwXGUtM^ZT?N~NPWNGcur8KfN?1{qO%d~})Fe_D__lzo&EOGrA%s7Gm1dZlurRysnW_Tn`Nk5b
Z`XON*OYTj#fU?c6adX!P~FJ6d;!S_c!Om<(1RTDTbiT3lpq1(HKACAZli>gM>7hhQDASpD7l2)R0aCmrR+kVh}{pL+96D8@E9R#m4cj_BuU?z$Q
>yVoEC__trfKUY2hqg_PMeX1yb^^now%tFif9WA5Nq$O)pOU>r_jTCqB?LpeCDF@h9r3ApSyj!9#x?dIA2--W=0yX0k9Q6mYSmF6r(T-uBb94Ey8
NN=NQRdkPUBz=O{c(C)46?yO?w%AKPA7~{|RgRM(#Vxl<|*+9XZd6&oWlwrCLq>yq{uUdZuhX-g*4eRP$DqEo8pSd%2(Y(a()WYhSHi%FnFFkE+L
2)K*oF$-NX`K7F*SVaBt5C{)#yj=yKr$KR1h`JMdE_n4OLEAdi0La9eA$egO7vDM~xnI9XExOTf*(yRF$^rPjmn0d+`5pn00n%3q2$a4j;^t7>~m
Y8IH4`7yhZ!)wP4~}~A6V~oBL+cNg3o6aesHG$OwOGAGYUx=jwmN*)r7L<!6}1B!egLnN5vxajN;-H}vY=RxUZc(W``tGg>eojq)Bsckyr$vxjd%
d1@1-@UX6XR*UW2Fu+-J1Z?MqR6)&oD6CMxZSCD5f2Q^4uc^w7a8)UFn)zNp2P2N~@!C0bqBFIvE<QuT$}uKKS<%S!L3a||jSbw!%jv;AjCGq|1Y
auYwTv4f<Tj%XDny%>szR!!y;6KzZVPJ2^l4+3nJ?9rw^yRmL&yX^0(`nH678wK$$;6Wk<(d}MMBnOFS*sX73UhFE~(wp6@B^+3i*Z<nVBuZaTrL
U%g!!OX0{dxN1lc)DFZEgGw{SW8oq)7
"""
